"""Reference of silu_and_mul: PyTorch's own silu."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """See eagle_kernels/ops/nn/silu_and_mul.py. Float64 tensors are computed in float64."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up
