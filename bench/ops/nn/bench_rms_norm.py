"""rms_norm over rows and hidden sizes, with the residual's addition and without."""

import torch

from bench.harness import grid
from bench.harness.inputs import half_dtype
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled

CASES = [
    *grid(hidden_size=4096, has_residual=[True, False], num_tokens=[1, 8, 64, 512, 4096]),
    *grid(hidden_size=[5120, 8192], has_residual=True, num_tokens=[1, 64, 4096]),
]
SMALL_CASES = [
    {"num_tokens": 3, "hidden_size": 96, "has_residual": True},
    {"num_tokens": 3, "hidden_size": 97, "has_residual": False},
]


def name(num_tokens, hidden_size, has_residual):
    return f"T={num_tokens} H={hidden_size}" + (" residual" if has_residual else "")


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


PEERS = {"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.rms_norm}
