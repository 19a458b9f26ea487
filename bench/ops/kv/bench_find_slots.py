"""find_slots for what a step of a tree writes, behind prefixes of 1024 tokens."""

import torch

from bench.harness import grid

CASES = grid(batch_size=[1, 8, 32, 128], count=64, page_size=16)
SMALL_CASES = grid(batch_size=3, count=9, page_size=4)
HEADLINES = ["B=8 N=64 P=16"]

name = "B={batch_size} N={count} P={page_size}".format


def make(device, batch_size, count, page_size):
    max_pages = 8192 // page_size
    table = torch.randperm(batch_size * max_pages, dtype=torch.int32, device=device).view(batch_size, max_pages)
    return {
        "block_table": table,
        "first": 1024 + torch.randint(0, 100, (batch_size,), device=device),
        "count": count,
        "page_size": page_size,
        "max_length": 8192,
    }


def count_bytes(batch_size, count, page_size):
    """The lengths and the pages that are met, slots and positions written."""
    return batch_size * (8 + 4 * -(-count // page_size) + 16 * count)


def prepare_torch(values):
    table, first, page_size = values["block_table"], values["first"], values["page_size"]
    place = torch.arange(values["count"], device=table.device)

    def run():
        tokens = first[:, None] + place
        index = tokens // page_size
        page = table.gather(1, index.clamp(max=table.shape[1] - 1)).long()
        has_page = (page >= 0) & (index < table.shape[1])
        slots = torch.where(has_page, page * page_size + tokens % page_size, -1)
        return {"slots": slots, "positions": tokens.clamp(max=values["max_length"] - 1)}

    return run
