"""draft_kv_indices for five steps of eight branches."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.run import main

TOPK = 8
NUM_STEPS = 5


def make(device, batch_size, prefix):
    columns = prefix + TOPK * NUM_STEPS
    slots = torch.randperm(batch_size * columns, device=device).to(torch.int32)
    return {
        "req_pool_indices": torch.randperm(batch_size, device=device),
        "req_to_token": slots.view(batch_size, columns),
        "seq_lens": torch.full((batch_size,), prefix, device=device),
        "topk": TOPK,
        "num_steps": NUM_STEPS,
        "capacity": batch_size * TOPK * (prefix + NUM_STEPS),
    }


def count_bytes(batch_size, prefix):
    """Each prefix read once, every step's indices and bounds written."""
    written = NUM_STEPS * (batch_size * TOPK * (prefix + NUM_STEPS) + batch_size * TOPK + 1)
    return 4 * (batch_size * prefix + written)


def prepare_torch(values):
    """Step by step; the totals are known on the host, as repeat_interleave would wait for the device without them."""
    table, capacity = values["req_to_token"], values["capacity"]
    device = table.device
    num_branches = len(values["seq_lens"]) * TOPK
    total = int(values["seq_lens"].sum()) * TOPK
    branch = torch.arange(num_branches, device=device)
    kv_indptr = torch.zeros(NUM_STEPS, num_branches + 1, dtype=torch.int32, device=device)
    kv_indices = torch.empty(NUM_STEPS, capacity, dtype=torch.int32, device=device)

    def run():
        lengths = values["seq_lens"].repeat_interleave(TOPK, output_size=num_branches)
        rows = values["req_pool_indices"].repeat_interleave(TOPK, output_size=num_branches)
        for step in range(NUM_STEPS):
            size = total + num_branches * (step + 1)
            kv_indptr[step, 1:] = (lengths + step + 1).cumsum(0)
            owner = branch.repeat_interleave(lengths + step + 1, output_size=size)
            place = torch.arange(size, device=device) - kv_indptr[step].gather(0, owner)
            is_prefix = place < lengths[owner]
            column = torch.where(is_prefix, place, place + owner % TOPK * NUM_STEPS)
            kv_indices[step, :size] = table[rows[owner], column]
            kv_indices[step, size:] = -1
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}

    return run


def _case(batch_size, prefix):
    # the reference makes Python lists
    is_checked = batch_size * prefix <= 8192
    return Case(f"B={batch_size} L={prefix}", {"batch_size": batch_size, "prefix": prefix}, is_checked)


BENCHMARK = Benchmark(
    path="kv.draft_kv_indices",
    cases=[_case(batch_size, prefix) for prefix in (1024, 8192) for batch_size in (1, 8, 32)],
    small_cases=[_case(3, 20)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
