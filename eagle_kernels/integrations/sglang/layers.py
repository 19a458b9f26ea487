"""Norms and activation of SGLang's models; what our ops do not take is left to SGLang."""

import torch

from ...ops.nn.rms_norm import MAX_HIDDEN
from .. import sgl_kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def forward_norm(original, norm, x, residual=None, post_residual_addition=None, *rest, **options):
    """Returns the RMS norm of x [T, H]; with a residual adds x to it and returns both, in place, as SGLang's layer.
    SGLang keeps norms of part of a row, those that round as Hugging Face's, those that quantise, and batch-invariant
    mode."""
    from sglang.srt.layers import layernorm

    is_plain = (
        not rest
        and all(value is None for value in (post_residual_addition, vars(norm).get("_quant_linear"), *options.values()))
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not layernorm.is_batch_invariant_mode_enabled()
    )
    weight = norm.weight.data
    if not (is_plain and _fits(x, weight) and (residual is None or _fits(residual, weight))):
        return original(norm, x, residual, post_residual_addition, *rest, **options)
    if residual is None:
        return sgl_kernel.rmsnorm(x, weight, norm.variance_epsilon)
    sgl_kernel.fused_add_rmsnorm(x, residual, weight, norm.variance_epsilon)
    return x, residual


def forward_activation(original, layer, x):
    """Returns silu of the first half of each row times its second half: x [..., 2 I] -> [..., I]."""
    if x.dtype not in _DTYPES or not x.is_contiguous() or not x.numel():
        return original(layer, x)
    return sgl_kernel.silu_and_mul(x)


def _fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    is_like = rows.dtype == weight.dtype and rows.device == weight.device
    is_matrix = rows.dim() == 2 and rows.is_contiguous() and rows.numel() > 0 and rows.shape[1] <= MAX_HIDDEN
    return is_like and is_matrix and rows.dtype in _DTYPES
