"""merge_drafts: a model's small trie and a longer one from retrieval."""

import torch

from bench.harness import grid

CASES = [
    {"num_drafts": num_drafts, "num_others": num_others, "batch_size": batch_size}
    for num_drafts, num_others in ((3, 4), (12, 20), (31, 32))
    for batch_size in (1, 32, 256)
]
SMALL_CASES = grid(batch_size=2, num_drafts=4, num_others=6)

name = "M={num_drafts} M2={num_others} B={batch_size}".format


def make(device, batch_size, num_drafts, num_others):
    """The beginnings of both agree, as where a model drafts what the text has said before."""
    node = torch.arange(num_drafts)
    tokens = torch.randint(32000, (batch_size, num_drafts))
    other_tokens = torch.randint(32000, (batch_size, num_others))
    other_tokens[:, :2] = tokens[:, :2]
    values = {
        "tokens": tokens,
        "parents": node.expand(batch_size, -1).contiguous(),
        "other_tokens": other_tokens,
        "other_parents": torch.arange(num_others).expand(batch_size, -1).contiguous(),
        "attach": torch.zeros(batch_size, dtype=torch.int64),
    }
    return {name: value.to(device) for name, value in values.items()} | {
        "num_speculative_tokens": num_drafts + num_others
    }


def count_bytes(batch_size, num_drafts, num_others):
    return batch_size * (16 * (num_drafts + num_others) + 8 + 16 * (num_drafts + num_others) + 4)


def prepare_torch(values):
    """Tensor operations, a handful for each node."""
    tokens = torch.cat([values["tokens"], values["other_tokens"]], dim=1)
    parents = torch.cat([values["parents"], values["other_parents"]], dim=1)
    (batch_size, count), num_first = tokens.shape, values["tokens"].shape[1]
    most, device = values["num_speculative_tokens"], tokens.device
    place = torch.arange(most, device=device)

    def run():
        kept_tokens = torch.full((batch_size, most), -1, device=device)
        kept_parents = torch.full_like(kept_tokens, -1)
        num_kept = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        moved = torch.full((batch_size, count + 2), -1, device=device)
        moved[:, 0] = 0
        for index in range(count):
            if index == num_first:
                root = moved.gather(1, values["attach"][:, None])
                moved = torch.full_like(moved, -1)
                moved[:, 0] = root[:, 0]
            own = index - num_first if index >= num_first else index
            token, named = tokens[:, index, None], parents[:, index, None]
            parent = torch.where((named >= 0) & (named <= own), moved.gather(1, named.clamp(0, count)), -1)
            is_twin = (kept_parents == parent) & (kept_tokens == token) & (place < num_kept)
            twin = torch.where(is_twin, place + 1, 0).amax(1, keepdim=True)
            exists = (parent >= 0) & (token >= 0)
            is_new = exists & (twin == 0) & (num_kept < most)
            here = (place == num_kept) & is_new
            kept_tokens, kept_parents = torch.where(here, token, kept_tokens), torch.where(here, parent, kept_parents)
            num_kept = num_kept + is_new
            target = torch.where(is_new, num_kept, torch.where(exists & (twin > 0), twin, -1))
            moved[:, own + 1] = target[:, 0]
        return {"tokens": kept_tokens, "parents": kept_parents, "num_drafts": num_kept[:, 0]}

    return run
