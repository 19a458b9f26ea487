"""Strides of rows, in a form from which the compiler sees alignment; and of tensors with a number for each token.

A stride that were a constant would compile the kernel anew for every stride. Of another the compiler must assume that a
row may begin anywhere, and loads element by element. A stride in units of 16 bytes avoids this: `row * stride * UNIT`
is a multiple of 16 bytes, whatever the stride is.
"""

import torch

from ..runtime import check
from ..runtime.language import tl, triton


def row_unit(*tensors: torch.Tensor) -> int:
    """Returns the elements in 16 bytes if every row of these tensors (of one dtype) is aligned to 16 bytes, else 1."""
    unit = 16 // tensors[0].element_size()
    for tensor in tensors:
        for size, stride in zip(tensor.shape[:-1], tensor.stride()):
            if size > 1 and stride % unit:
                return 1
    return unit


def token_sizes(name: str) -> list[str]:
    """Returns the names of the sizes that `of_token` reads, for a tensor called `name`."""
    return [f"num_{name}_columns", f"stride_{name}_row", f"stride_{name}_column"]


@triton.jit
def of_token(token, num_columns, stride_row, stride_column):
    """Returns where a token's number lies in a tensor [T], or [B, T / B] with any strides, int64."""
    row = token // num_columns
    return row.to(tl.int64) * stride_row + (token % num_columns).to(tl.int64) * stride_column


def check_tokens(args: check.Arguments, name: str) -> None:
    """Checks integers [T], or [B, T / B] with any strides; T is bound before."""
    value = args.values[name]
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        args.tensor(name, ("T",), check.INTEGER, contiguous=0)
        return
    args.tensor(name, (None, None), check.INTEGER, contiguous=0)
    if value.numel() != args.size("T"):
        args.fail(name, f"have a number for each of T = {args.size('T')} tokens", f"shape {list(value.shape)}")


def token_arguments(name: str, tensor: torch.Tensor | None) -> dict:
    """Returns the sizes of a tensor checked by `check_tokens`, or of none, as launch arguments."""
    sizes = (1, 0, 0)
    if tensor is not None:
        *rows, num_columns = tensor.shape
        sizes = max(num_columns, 1), tensor.stride(0) if rows else 0, tensor.stride(-1)
    return dict(zip(token_sizes(name), sizes))
