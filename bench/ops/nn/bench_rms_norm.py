"""rms_norm over rows and hidden sizes, with the residual's addition and without."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import half_dtype
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled
from bench.run import main


def make(device, num_tokens, hidden_size, has_residual):
    tensors = torch.randn(2, num_tokens, hidden_size, device=device).to(half_dtype(device))
    weight = 1.0 + 0.1 * torch.randn(hidden_size, device=device)
    values = {"x": tensors[0], "weight": weight.to(tensors.dtype)}
    return values | ({"residual": tensors[1]} if has_residual else {})


def count_bytes(num_tokens, hidden_size, has_residual):
    return 2 * hidden_size * (num_tokens * (4 if has_residual else 2) + 1)


def prepare_torch(values):
    """PyTorch's own norm, which rounds once."""
    x, weight, residual = values["x"], values["weight"], values.get("residual")

    def run():
        if residual is None:
            return {"output": torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)}
        total = x + residual
        return {"output": torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-6), "residual": total}

    return run


def _case(num_tokens, hidden_size, has_residual):
    name = f"T={num_tokens} H={hidden_size}" + (" residual" if has_residual else "")
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "has_residual": has_residual}
    return Case(name, sizes)


BENCHMARK = Benchmark(
    path="nn.rms_norm",
    cases=[
        *(_case(tokens, 4096, residual) for residual in (True, False) for tokens in (1, 8, 64, 512, 4096)),
        *(_case(tokens, size, True) for size in (5120, 8192) for tokens in (1, 64, 4096)),
    ],
    small_cases=[_case(3, 96, True), _case(3, 97, False)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.rms_norm},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
