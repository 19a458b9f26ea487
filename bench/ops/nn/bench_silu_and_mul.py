"""silu_and_mul between the matrix products of an 8B model's MLP, packed and apart, over tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import half_dtype
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled
from bench.run import main


def make(device, num_tokens, num_columns, is_packed):
    gate = torch.randn(num_tokens, 2 * num_columns, device=device).to(half_dtype(device))
    if is_packed:
        return {"gate": gate}
    return {"gate": gate[:, :num_columns].contiguous(), "up": gate[:, num_columns:].contiguous()}


def count_bytes(num_tokens, num_columns, is_packed):
    return 3 * 2 * num_tokens * num_columns


def prepare_torch(values):
    gate, up = values["gate"], values.get("up")
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return lambda: torch.nn.functional.silu(gate) * up


def _case(num_tokens, is_packed=True, num_columns=14336):
    sizes = {"num_tokens": num_tokens, "num_columns": num_columns, "is_packed": is_packed}
    return Case(f"T={num_tokens} I={num_columns}" + ("" if is_packed else " apart"), sizes)


BENCHMARK = Benchmark(
    path="nn.silu_and_mul",
    cases=[*(_case(tokens) for tokens in (1, 8, 64, 512, 4096)), *(_case(tokens, False) for tokens in (1, 64))],
    small_cases=[_case(3, num_columns=70), _case(3, False, num_columns=64)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.silu_and_mul},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
