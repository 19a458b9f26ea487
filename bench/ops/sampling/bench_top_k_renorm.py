"""top_k_renorm of flat rows and of rows that hold little but zeros."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark
from bench.harness.renorms import cases, count_bytes, divided, make_probs, small_cases
from bench.peers import flashinfer
from bench.run import main


def make(device, rows, vocab_size, kind, top_k):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "top_k": torch.full((rows,), top_k, dtype=torch.int32, device=device)}


def prepare_torch(values):
    probs, last = values["probs"], values["top_k"][:, None].long() - 1

    def run():
        ordered = probs.sort(dim=-1, descending=True).values
        return divided(probs.masked_fill(probs < ordered.gather(1, last), 0.0))

    return run


BENCHMARK = Benchmark(
    path="sampling.top_k_renorm",
    cases=cases(top_k=50),
    small_cases=small_cases(top_k=50),
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.top_k_renorm},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
