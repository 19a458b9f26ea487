"""The norms, the activation, the rotary embedding and the renormalizing filters of `sgl_kernel`, on top of our ops.

Names, argument order and rounding are those of `sgl_kernel.elementwise` and `sgl_kernel.sampling`: each op rounds once,
at the end, even if it adds a residual first. `enable_pdl` is accepted and ignored: our launches decide for
themselves. `sgl_kernel.py` has these names too.
"""

import torch
from torch import Tensor

from .. import ops
from ..ops.nn.rms_norm import Output as _NormOutput
from ..ops.nn.rope import Output as _RopeOutput

__all__ = [
    "apply_rope_with_cos_sin_cache_inplace", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "rmsnorm",
    "silu_and_mul", "top_k_renorm_prob", "top_k_renorm_probs", "top_p_renorm_prob", "top_p_renorm_probs",
]  # fmt: skip


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Returns input [T, H] normalized, or writes it to `out`."""
    return _norm(input, weight, eps, 0.0, out)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Does what rmsnorm does, with 1 + weight."""
    return _norm(input, weight, eps, 1.0, out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Adds input to residual and writes the norm of the sum to input, both in place."""
    _add_norm(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Does what fused_add_rmsnorm does, with 1 + weight."""
    _add_norm(input, residual, weight, eps, 1.0)


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns silu of the first half of each row times its second half: input [..., 2 I] -> [..., I]."""
    rows = input.view(-1, input.shape[-1])
    if out is None:
        return ops.silu_and_mul(rows, round_activation=False).view(*input.shape[:-1], -1)
    ops.silu_and_mul(rows, round_activation=False, out=out.view(-1, out.shape[-1]))
    return out


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True,
    fused_set_kv_buffer_arg=None, enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """Rotates query [T, Hq * head_size] and key [T, Hkv * head_size] in place.
    cos_sin_cache [max_positions, rotary_dim] fp32: cosines, then sines. fused_set_kv_buffer_arg is refused: our op
    write_kv rotates and writes in one launch."""
    if fused_set_kv_buffer_arg is not None:
        name = "apply_rope_with_cos_sin_cache_inplace"
        raise ValueError(f"{name}: fused_set_kv_buffer_arg must be None, got a value; eagle_kernels.write_kv does this")
    heads = [tensor.view(len(tensor), -1, head_size) for tensor in (query, key)]
    cos, sin = cos_sin_cache.chunk(2, dim=1)
    ops.rope(*heads, positions, cos, sin, is_interleaved=not is_neox, out=_RopeOutput(*heads))


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Returns probs [T, V] fp32 of only the k most likely tokens, renormalized."""
    return ops.top_k_renorm(probs, _per_row(probs, top_k, torch.int32))


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Returns probs [T, V] fp32 of the fewest likeliest tokens that hold top_p, renormalized."""
    return ops.top_p_renorm(probs, _per_row(probs, top_p, torch.float32))


top_k_renorm_probs, top_p_renorm_probs = top_k_renorm_prob, top_p_renorm_prob


def _norm(rows, weight, eps, weight_offset, out):
    """Norms rows into `out`, or into a new tensor."""
    options = {"eps": eps, "weight_offset": weight_offset, "round_normalized": False}
    if out is None:
        return ops.rms_norm(rows, weight, **options).output
    ops.rms_norm(rows, weight, **options, out=_NormOutput(out, rows[:0]))
    return out


def _add_norm(rows, residual, weight, eps, weight_offset):
    """Adds rows to residual and norms the sum into rows, both in place."""
    ops.rms_norm(
        rows, weight, residual, eps=eps, weight_offset=weight_offset, round_sum=False, round_normalized=False,
        out=_NormOutput(rows, residual),
    )  # fmt: skip


def _per_row(probs, value, dtype):
    """Returns a tensor with a value for each row."""
    if isinstance(value, Tensor):
        return value
    return torch.full((len(probs),), value, dtype=dtype, device=probs.device)
