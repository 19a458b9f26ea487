"""Reference of linear_decode: a matrix product whose sums are fp32, rounded once, or not at all in parts."""

import torch


def linear_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, num_parts: int | None = None
) -> torch.Tensor:
    """See eagle_kernels/ops/linear/linear_decode.py. Float64 tensors are computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_sections = -(-x.shape[1] // 128)
    bounds = [part * num_sections // (num_parts or 1) * 128 for part in range((num_parts or 1) + 1)]
    parts = torch.stack([
        x[:, first:stop].to(wide) @ weight[:, first:stop].to(wide).T for first, stop in zip(bounds, bounds[1:])
    ])  # fmt: skip
    if bias is not None:
        parts[0] += bias.to(wide)
    return parts[0].to(x.dtype) if num_parts is None else parts
