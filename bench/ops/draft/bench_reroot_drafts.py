"""reroot_drafts over sizes of tries and batches."""

import torch

from bench.harness import grid

CASES = [
    {"num_drafts": num_drafts, "num_kept": num_kept, "batch_size": batch_size}
    for num_drafts, num_kept in ((63, 31), (255, 63), (1023, 63))
    for batch_size in (1, 32, 256)
]
SMALL_CASES = grid(batch_size=2, num_drafts=31, num_kept=8)

name = "M={num_drafts} K={num_kept} B={batch_size}".format


def make(device, batch_size, num_drafts, num_kept):
    """Tries as retrieval makes them, most nodes behind the one before; the first three tokens are committed."""
    node = torch.arange(1, num_drafts + 1)
    elsewhere = (torch.rand(batch_size, num_drafts) * node).long()
    parents = torch.where(torch.rand(batch_size, num_drafts) < 0.15, elsewhere, node - 1)
    parents[:, :3] = torch.arange(3)
    tokens = torch.randint(32000, (batch_size, num_drafts))
    path = torch.full((batch_size, 6), -1)
    path[:, :3] = tokens[:, :3]
    values = {"tokens": tokens.to(device), "parents": parents.to(device), "path": path.to(device)}
    return values | {"num_speculative_tokens": num_kept, "spec_steps": 16}


def count_bytes(batch_size, num_drafts, num_kept):
    return batch_size * (16 * num_drafts + 48 + 16 * num_kept + 4)


def prepare_torch(values):
    """Tensor operations: a comparison of all nodes a step of the path, a gather a level of the tree; of sound tries."""
    tokens, parents, path = values["tokens"], values["parents"], values["path"]
    num_kept = values["num_speculative_tokens"]
    (batch_size, num_drafts), device = tokens.shape, tokens.device
    node = torch.arange(1, num_drafts + 1, device=device)
    index = torch.arange(num_kept, device=device)

    def run():
        root = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        for place in range(path.shape[1]):
            committed = path[:, place : place + 1]
            is_child = (parents == root) & (tokens == committed)
            child = torch.where(is_child.any(1, keepdim=True), is_child.int().argmax(1, keepdim=True) + 1, -2)
            root = torch.where(committed < 0, root, child)
        depth = torch.where(torch.nn.functional.pad(node, (1, 0)) == root, 0, -1)
        for level in range(values["spec_steps"]):
            is_next = (depth.gather(1, parents) == level) & (depth[:, 1:] < 0)
            depth = torch.cat([depth[:, :1], torch.where(is_next, level + 1, depth[:, 1:])], dim=1)
        is_kept = depth[:, 1:] > 0
        number = torch.where(is_kept, is_kept.cumsum(1), 0)
        new_parents = torch.nn.functional.pad(number, (1, 0)).gather(1, parents)
        # what is not kept is written behind the last that is
        target = torch.where(is_kept & (number <= num_kept), number - 1, num_kept)
        count = is_kept.sum(1).clamp(max=num_kept)
        outputs = {"num_drafts": count}
        for name, rows in (("tokens", tokens), ("parents", new_parents)):
            made = torch.full((batch_size, num_kept + 1), -1, device=device).scatter_(1, target, rows)
            outputs[name] = torch.where(index < count[:, None], made[:, :num_kept], -1)
        return outputs

    return run
