"""Reference of linear_decode: a matrix product whose sums are fp32, rounded once."""

from __future__ import annotations

import torch


def linear_decode(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See eagle_kernels/ops/nn/linear_decode.py. Float64 tensors are computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    output = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        output = output + bias.to(wide)
    return output.to(x.dtype)
