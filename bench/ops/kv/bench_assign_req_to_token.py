"""assign_req_to_token for what a verification accepted, and for a prompt."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.run import main


def make(device, batch_size, prefix, num_tokens):
    starts = torch.full((batch_size,), prefix, device=device)
    return {
        "req_pool_indices": torch.randperm(batch_size, device=device),
        "req_to_token": torch.zeros(batch_size, prefix + num_tokens, dtype=torch.int32, device=device),
        "starts": starts,
        "ends": starts + num_tokens,
        "cache_locs": torch.randperm(batch_size * num_tokens, device=device),
    }


def count_bytes(batch_size, prefix, num_tokens):
    """Slots read as int64 and written as int32."""
    return 12 * batch_size * num_tokens


def prepare_torch(values):
    """The number of slots is known on the host, as repeat_interleave would wait for the device without it."""
    table, slots = values["req_to_token"], values["cache_locs"]
    request = torch.arange(len(values["starts"]), device=table.device)
    entry = torch.arange(len(slots), device=table.device)

    def run():
        counts = values["ends"] - values["starts"]
        owner = request.repeat_interleave(counts, output_size=len(slots))
        column = values["starts"][owner] + entry - (counts.cumsum(0) - counts)[owner]
        table[values["req_pool_indices"][owner], column] = slots.to(table.dtype)

    return run


def _case(batch_size, prefix, num_tokens):
    sizes = {"batch_size": batch_size, "prefix": prefix, "num_tokens": num_tokens}
    is_headline = (batch_size, num_tokens) == (8, 5)
    return Case(f"B={batch_size} {num_tokens} tokens behind {prefix}", sizes, is_headline=is_headline)


BENCHMARK = Benchmark(
    path="kv.assign_req_to_token",
    cases=[
        *(_case(batch_size, 8192, 5) for batch_size in (1, 8, 32, 128)),
        *(_case(batch_size, 0, 8192) for batch_size in (1, 8)),
    ],
    small_cases=[_case(3, 20, 5)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
