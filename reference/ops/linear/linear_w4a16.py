"""Reference of linear_w4a16: weights of 4 bits are unpacked, rounded to the dtype of x, and multiplied."""

import torch

from .linear_decode import linear_decode
from .shared.packing import by_column, unpack


def linear_w4a16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    group_size: int | None = None,
    num_parts: int | None = None,
) -> torch.Tensor:
    """See eagle_kernels/ops/linear/linear_w4a16.py. Float64 tensors are computed in float64."""
    weights = dequantise(x, weight, scales, zeros, group_size)
    return linear_decode(reorder(x, columns), weights, bias, num_parts=num_parts)


def reorder(x: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Returns the columns of x in the order of the weights."""
    return x if columns is None else x[:, columns.long()]


def dequantise(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int | None
) -> torch.Tensor:
    """Returns (q - zero) * scale, [N, K] in the dtype of x."""
    num_columns, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    values = unpack(weight, 4, scales.shape[group_size is not None], num_columns)
    values = values - (8 if zeros is None else by_column(zeros.long(), group_size, num_columns))
    return (values.to(wide) * by_column(scales.to(wide), group_size, num_columns)).to(x.dtype)
