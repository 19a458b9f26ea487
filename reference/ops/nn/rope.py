"""Reference of rope: two products and a sum."""

from typing import NamedTuple

import torch

from ...rotary import rotate


class Output(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor


def rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    *, is_interleaved: bool = False,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/nn/rope.py."""
    return Output(*(rotate(heads, positions, cos, sin, is_interleaved) for heads in (query, key)))
