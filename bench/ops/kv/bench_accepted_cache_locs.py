"""accepted_cache_locs after four accepted drafts of trees of 64 nodes, with pages of 1 and of 16."""

import torch

from bench.harness import grid

NUM_NODES = 64
# the accepted path, root first, and a depth that it did not reach
PATH = (0, 3, 9, 20, 40, -1)

CASES = grid(page_size=[1, 16], batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, page_size=[1, 16])
HEADLINES = ["B=8 P=16"]

name = "B={batch_size} P={page_size}".format


def make(device, batch_size, page_size):
    path, request = torch.tensor(PATH, device=device), torch.arange(batch_size, device=device)[:, None]
    return {
        "cache_locs": torch.randperm(batch_size * NUM_NODES, device=device),
        "accept_token_num": torch.full((batch_size,), len(PATH) - 2, dtype=torch.int32, device=device),
        "accept_index": torch.where(path >= 0, path + NUM_NODES * request, -1).to(torch.int32),
        "seq_lens": 1024 + torch.randint(0, 100, (batch_size,), device=device),
        "num_verify_tokens": NUM_NODES,
        "page_size": page_size,
    }


def count_bytes(batch_size, page_size):
    """Paths, lengths and slots read, the lists and bounds written."""
    read = 4 * len(PATH) + 4 + 8 + 8 * NUM_NODES
    return batch_size * (read + 16 * len(PATH) + 8 * NUM_NODES) + 8 * (batch_size + 1)


def prepare_torch(values):
    """Lists are packed by a running sum and a scatter: a mask as an index would wait for the device."""
    batch_size, page_size = len(values["seq_lens"]), values["page_size"]
    device = values["cache_locs"].device
    depth, node = torch.arange(len(PATH), device=device), torch.arange(NUM_NODES, device=device)

    def pack(slots, is_listed):
        packed = torch.full((slots.numel() + 1,), -1, device=device)
        is_listed = is_listed.flatten()
        place = torch.where(is_listed, is_listed.cumsum(0) - 1, slots.numel())
        return packed.scatter_(0, place, slots.flatten())[:-1]

    def run():
        slots, path = values["cache_locs"].view(batch_size, NUM_NODES), values["accept_index"]
        is_node = (path >= 0) & (depth <= values["accept_token_num"][:, None])
        end = values["seq_lens"] + values["accept_token_num"] + 1
        kept = (end + page_size - 1) // page_size * page_size - values["seq_lens"]
        return {
            "source_locs": pack(values["cache_locs"][path.clamp(min=0)], is_node),
            "target_locs": pack(slots[:, : len(PATH)], is_node),
            "free_locs": pack(slots, node >= kept[:, None]),
        }

    return run
