"""top_p_renorm of flat rows and of rows that hold little but zeros."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark
from bench.harness.renorms import cases, count_bytes, divided, make_probs, small_cases
from bench.peers import flashinfer
from bench.run import main


def make(device, rows, vocab_size, kind, top_p):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "top_p": torch.full((rows,), top_p, device=device)}


def prepare_torch(values):
    probs, top_p = values["probs"], values["top_p"][:, None]

    def run():
        ordered, ids = probs.sort(dim=-1, descending=True)
        mass = ordered.cumsum(dim=-1)
        kept = ordered.masked_fill(mass - ordered >= top_p * mass[:, -1:], 0.0)
        return divided(torch.zeros_like(probs).scatter_(1, ids, kept))

    return run


BENCHMARK = Benchmark(
    path="sampling.top_p_renorm",
    cases=cases(top_p=0.9),
    small_cases=small_cases(top_p=0.9),
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.top_p_renorm},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
