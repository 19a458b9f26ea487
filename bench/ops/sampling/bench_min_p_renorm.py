"""min_p_renorm of flat rows and of rows that hold little but zeros."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark
from bench.harness.renorms import cases, count_bytes, divided, make_probs, small_cases
from bench.run import main


def make(device, rows, vocab_size, kind, min_p):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "min_p": torch.full((rows,), min_p, device=device)}


def prepare_torch(values):
    probs, min_p = values["probs"], values["min_p"][:, None]

    def run():
        return divided(probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0))

    return run


BENCHMARK = Benchmark(
    path="sampling.min_p_renorm",
    cases=cases(min_p=0.1),
    small_cases=small_cases(min_p=0.1),
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
