"""plan_attention: the lengths of a batch summed up, once a step."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import ODD_BATCH, lengths
from bench.run import main


def make(device, batch_size, num_drafts):
    return {"seq_lens": lengths(batch_size, 8192, "ragged").to(device), "num_drafts": num_drafts}


def count_bytes(batch_size, num_drafts):
    return 4 * (2 * batch_size + 1)


def prepare_torch(values):
    seq_lens, num_drafts = values["seq_lens"], values["num_drafts"]

    def run():
        blocks = ((seq_lens + num_drafts + 31) // 32).clamp(min=1)
        return {"output": torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))}

    return run


def _case(batch_size, num_drafts=0):
    sizes = {"batch_size": batch_size, "num_drafts": num_drafts}
    return Case(f"B={batch_size} N={num_drafts}", sizes, True, (batch_size, num_drafts) == (32, 0))


BENCHMARK = Benchmark(
    path="attention.plan_attention",
    cases=[*(_case(batch_size) for batch_size in (1, ODD_BATCH, 32, 256)), _case(32, 64)],
    small_cases=[_case(3), _case(3, 8)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
