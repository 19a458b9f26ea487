"""linear_decode on the projections of Llama-3.1-8B, and in fp32 on small ones, over tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Floor
from bench.harness.inputs import half_dtype
from bench.run import main

PROJECTIONS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}

TOKENS = (1, 2, 4, 8, 16)
SINGLE_TOKENS = (*TOKENS, 32, 64)
# in fp32: two of the embedded pair, and one of an 8B model
SINGLE = {"small gate_up float32": (1280, 256), "small down float32": (256, 640), "o float32": (4096, 4096)}


def make(device, num_tokens, num_outputs, num_columns, is_single=False):
    # drawn in the dtype: the vocabulary's weights in fp32 would take 2 GiB more
    dtype = torch.float32 if is_single else half_dtype(device)
    weight = torch.empty(num_outputs, num_columns, dtype=dtype, device=device).normal_()
    x = torch.randn(num_tokens, num_columns, device=device).to(dtype) / num_columns**0.5
    return {"weight": weight, "x": x, "prefetch_weight": True}


def count_bytes(num_tokens, num_outputs, num_columns, is_single=False):
    element_bytes = 4 if is_single else 2
    return element_bytes * (num_outputs * num_columns + num_tokens * (num_columns + num_outputs))


def prepare_torch(values):
    """cuBLAS."""
    x, weight = values["x"], values["weight"]
    return lambda: torch.nn.functional.linear(x, weight)


def _case(num_tokens, num_outputs, num_columns, name="", **more):
    sizes = {"num_tokens": num_tokens, "num_outputs": num_outputs, "num_columns": num_columns} | more
    return Case(f"T={num_tokens} N={num_outputs} K={num_columns}" + (f" {name}" if name else ""), sizes)


BENCHMARK = Benchmark(
    path="nn.linear_decode",
    cases=[
        *(_case(tokens, *size, name) for name, size in PROJECTIONS.items() for tokens in TOKENS),
        *(_case(tokens, *size, name, is_single=True) for name, size in SINGLE.items() for tokens in SINGLE_TOKENS),
    ],
    small_cases=[_case(1, 70, 96), _case(3, 70, 97), _case(5, 70, 96, "float32", is_single=True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    floor=Floor("read", 0.0),
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
