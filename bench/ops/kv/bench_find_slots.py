"""find_slots for what a step of a tree writes, behind prefixes of 1024 tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.run import main


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


def _case(batch_size, count=64, page_size=16):
    sizes = {"batch_size": batch_size, "count": count, "page_size": page_size}
    return Case(f"B={batch_size} N={count} P={page_size}", sizes, is_headline=batch_size == 8)


BENCHMARK = Benchmark(
    path="kv.find_slots",
    cases=[_case(batch_size) for batch_size in (1, 8, 32, 128)],
    small_cases=[_case(3, count=9, page_size=4)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
