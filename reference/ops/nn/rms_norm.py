"""Reference of rms_norm: the formula, step by step as Hugging Face's models round."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    output: torch.Tensor
    residual: torch.Tensor


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None,
    *, eps: float = 1e-6, weight_offset: float = 0.0, round_sum: bool = True, round_normalized: bool = True,
    sums_parts: bool = False,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/nn/rms_norm.py. Float64 tensors are computed in float64."""
    if sums_parts:
        x = sum(x[1:], x[0]).to(weight.dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x[:0].clone()
    if residual is not None:
        wide = wide + residual
        total = wide.to(x.dtype)
        if round_sum:
            wide = total.to(wide.dtype)
    normalized = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_normalized:
        normalized = normalized.to(x.dtype).to(wide.dtype)
    output = normalized * (weight_offset + weight.to(wide.dtype))
    return Output(output.to(x.dtype), total)
