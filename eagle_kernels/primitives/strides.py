"""Strides of rows, told to a kernel so that it still knows where rows begin.

A stride is no constant of a kernel, which would compile anew for each one. But then the compiler knows nothing about
it, takes it that a row may begin anywhere, and loads element by element. Counted in units of 16 bytes a stride tells
what is needed: `row * stride * UNIT` is a multiple of 16 bytes, whatever the stride is.
"""

from __future__ import annotations

import torch


def row_unit(*tensors: torch.Tensor) -> int:
    """The elements in 16 bytes if every row of these tensors (of one dtype) begins at a multiple of that, else 1."""
    unit = 16 // tensors[0].element_size()
    for tensor in tensors:
        for size, stride in zip(tensor.shape[:-1], tensor.stride()):
            if size > 1 and stride % unit:
                return 1
    return unit
