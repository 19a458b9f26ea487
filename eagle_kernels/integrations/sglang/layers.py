"""Norms and activation of SGLang's models; shapes and dtypes that our ops do not take are left to SGLang."""

from __future__ import annotations

import torch

from .. import sgl_kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rmsnorm(original, input, weight, eps=1e-6, out=None, enable_pdl=None):
    """Returns the norm of input [T, H], or writes it to `out`."""
    if not (_fits(input, weight) and (out is None or _fits(out, weight))):
        return original(input, weight, eps, out, enable_pdl)
    return sgl_kernel.rmsnorm(input, weight, eps, out)


def fused_add_rmsnorm(original, input, residual, weight, eps=1e-6, enable_pdl=None):
    """Adds input [T, H] to residual and writes the norm of the sum to input, both in place."""
    if not (_fits(input, weight) and _fits(residual, weight)):
        return original(input, residual, weight, eps, enable_pdl)
    return sgl_kernel.fused_add_rmsnorm(input, residual, weight, eps)


def silu_and_mul(original, input, out=None):
    """Returns silu of the first half of each row times its second half: input [..., 2 I] -> [..., I]."""
    if not (input.is_cuda and input.dtype in _DTYPES and input.is_contiguous()):
        return original(input, out)
    return sgl_kernel.silu_and_mul(input, out)


def _fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    return rows.is_cuda and rows.dim() == 2 and rows.is_contiguous() and rows.dtype == weight.dtype in _DTYPES
