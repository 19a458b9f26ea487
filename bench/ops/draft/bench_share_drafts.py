"""share_drafts: a model's tree, and what retrieval found once or twice."""

import torch

from bench.harness import grid

CASES = [
    {"num_drafters": num_drafters, "num_drafts": num_drafts, "batch_size": batch_size}
    for num_drafters, num_drafts in ((2, 15), (2, 31), (3, 63))
    for batch_size in (1, 32, 256)
]
SMALL_CASES = grid(batch_size=2, num_drafters=2, num_drafts=6)

name = "P={num_drafters} M={num_drafts} B={batch_size}".format


def make(device, batch_size, num_drafters, num_drafts):
    """The beginnings of all agree, as where a model drafts what the text has said before."""
    shape = batch_size, num_drafters, num_drafts
    tokens = torch.randint(32000, shape)
    tokens[:, :, :2] = tokens[:, :1, :2]
    node = torch.arange(1, num_drafts + 1)
    elsewhere = (torch.rand(shape) * node).long()
    parents = torch.where(torch.rand(shape) < 0.3, elsewhere, node - 1)
    parents[:, :, :2] = torch.arange(2)[:num_drafts]
    values = {"tokens": tokens, "parents": parents, "probs": torch.rand(shape)}
    values["factors"] = torch.rand(num_drafters, 8) + 0.5
    return {name: value.to(device) for name, value in values.items()} | {"num_speculative_tokens": num_drafts}


def count_bytes(batch_size, num_drafters, num_drafts):
    return batch_size * (20 * num_drafters * num_drafts + (20 + 4 * num_drafters) * num_drafts + 4)


def prepare_torch(values):
    """Tensor operations on sound tries: paths as sums of random numbers, all pairs compared, levels one by one."""
    tokens, parents, probs = (values[name] for name in ("tokens", "parents", "probs"))
    factors, most, device = values["factors"], values["num_speculative_tokens"], tokens.device
    batch_size, num_drafters, num_drafts = tokens.shape
    num_levels, count = factors.shape[1], num_drafters * num_drafts
    drafter = torch.arange(num_drafters, device=device)[:, None]
    earlier = torch.ones(count, count, dtype=torch.bool, device=device).tril(-1)

    def run():
        depth = torch.zeros(batch_size, num_drafters, num_drafts + 1, dtype=torch.int64, device=device)
        name = torch.zeros_like(depth)
        for _ in range(num_drafts):
            above, above_name = depth.gather(2, parents), name.gather(2, parents)
            depth[..., 1:], name[..., 1:] = above + 1, (above_name * 1000003 + tokens + 1) * 69069 % (2**40 + 15)
        own, own_depth = name[..., 1:].flatten(1), depth[..., 1:].flatten(1)
        promised = probs * factors[drafter, own_depth.view_as(probs).clamp(max=num_levels) - 1]
        is_same = own[:, :, None] == own[:, None, :]
        best = torch.where(is_same, promised.flatten(1).clamp(max=1)[:, None], 0.0).amax(2)
        first = is_same.int().argmax(2)
        at = (parents + drafter * num_drafts - 1).flatten(1)
        parent = torch.where(parents.flatten(1) > 0, first.gather(1, at.clamp(min=0)), -1)
        score = best.clone()
        for level in range(2, num_drafts + 1):
            above = score.gather(1, parent.clamp(min=0))
            score = torch.where(own_depth == level, above * best, score)
        score = torch.where((is_same & earlier).any(2), -1.0, score)
        kept = score.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(1).values
        return {"tokens": tokens.flatten(1).gather(1, kept), "scores": score.gather(1, kept)}

    return run
