"""linear_decode on the projections of Llama-3.1-8B, and in fp32 on small ones, over tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Floor, Unavailable
from bench.harness.inputs import half_dtype
from bench.run import main

PROJECTIONS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
SINGLE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
# in fp32: two of the embedded pair, and one of an 8B model
SINGLE = {"small gate_up float32": (1280, 256), "small down float32": (256, 640), "o float32": (4096, 4096)}


def make(device, num_tokens, num_outputs, num_columns, is_single=False, num_parts=None):
    # drawn in the dtype: the vocabulary's weights in fp32 would take 2 GiB more
    dtype = torch.float32 if is_single else half_dtype(device)
    weight = torch.empty(num_outputs, num_columns, dtype=dtype, device=device).normal_()
    x = torch.randn(num_tokens, num_columns, device=device).to(dtype) / num_columns**0.5
    return {"weight": weight, "x": x, "prefetch_weight": True, "num_parts": num_parts}


def count_bytes(num_tokens, num_outputs, num_columns, is_single=False, num_parts=None):
    element_bytes = 4 if is_single else 2
    output_bytes = element_bytes if num_parts is None else 4 * num_parts
    return element_bytes * (num_outputs + num_tokens) * num_columns + output_bytes * num_tokens * num_outputs


def prepare_torch(values):
    """cuBLAS, which rounds the whole product."""
    x, weight, num_parts = values["x"], values["weight"], values["num_parts"]
    if num_parts is not None:
        raise Unavailable("makes no parts")
    return lambda: torch.nn.functional.linear(x, weight)


def _case(num_tokens, num_outputs, num_columns, name="", **more):
    sizes = {"num_tokens": num_tokens, "num_outputs": num_outputs, "num_columns": num_columns} | more
    return Case(f"T={num_tokens} N={num_outputs} K={num_columns}" + (f" {name}" if name else ""), sizes)


BENCHMARK = Benchmark(
    path="nn.linear_decode",
    cases=[
        *(_case(tokens, *size, name) for name, size in PROJECTIONS.items() for tokens in TOKENS),
        *(
            _case(tokens, *PROJECTIONS[name], f"{name} in parts", num_parts=2)
            for name in ("o", "down")
            for tokens in (32, 64)
        ),
        *(_case(tokens, *size, name, is_single=True) for name, size in SINGLE.items() for tokens in SINGLE_TOKENS),
    ],
    small_cases=[
        _case(1, 70, 96),
        _case(3, 70, 97),
        _case(20, 70, 97),
        _case(20, 70, 200, "in parts", num_parts=2),
        _case(5, 70, 96, "float32", is_single=True),
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    floor=Floor("read", 0.0),
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
