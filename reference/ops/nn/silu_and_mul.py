"""Reference of silu_and_mul: PyTorch's own silu."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor | None = None, *, round_activation: bool = True) -> torch.Tensor:
    """See eagle_kernels/ops/nn/silu_and_mul.py. Float64 tensors are computed in float64."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if round_activation:
        return F.silu(gate) * up
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up).to(gate.dtype)
