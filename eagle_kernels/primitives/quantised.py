"""Blocks of 128 columns of quantised weights: their words become a tile, with scales and zero points, for a product.

Scales and zero points of two groups of an output lie in a word. A scale is multiplied with the sums of its group's
columns (late) or with weights, which are then rounded (early). The layout is that of
reference/ops/linear/shared/packing.py.
"""

from typing import NamedTuple

import torch

from ..runtime import target
from ..runtime.language import KEEPS_OPERANDS, is_interpreting, tl, triton
from .products import multiply
from .unpacking import Numbers, await_products, scale_of, unpack


class Format(NamedTuple):
    """What weights are, and how they become numbers: constants of a kernel."""

    BITS: int  # 4 or 8
    IS_FLOAT: bool  # float8_e4m3fn, of 4 bits e2m1; else whole numbers, of 8 bits in two's complement
    HAS_ZEROS: bool
    GROUP: int  # columns of a group; 0: a scale is for whole rows
    IS_SCALE_BF16: bool  # of groups; else fp16
    IS_EARLY: bool
    IS_ASSEMBLED: bool  # by instructions of NVIDIA
    IS_AWAITED: bool  # products, where Hopper needs it, see `await_products`
    X_SCALES: int  # x is in 8 bits as well: 1 has a scale a row, 2 one for each block of columns; 0: it is not


@triton.jit
def _load_words(pointer, block, output, stride, GROUP: tl.constexpr, FOR_SUMS: tl.constexpr):
    """Loads words of two groups of each output, for a block of columns: see `unpack`.
    FOR_SUMS: they are for sums. For weights, a shift by the number of the block would keep Triton from choosing the
    layout of the tensor cores for the words of these."""
    GROUPS: tl.constexpr = 128 // GROUP
    word_ptrs = pointer + (block * GROUPS >> 1).to(tl.int64) * stride + output
    if GROUPS == 1 and FOR_SUMS:
        return (tl.load(word_ptrs) >> (block & 1) * 16,)
    elif GROUPS == 1:
        even = tl.load(word_ptrs, mask=(block % 2 == 0) & (output >= 0), other=0)
        odd = tl.load(word_ptrs, mask=(block % 2 == 1) & (output >= 0), other=0)
        return ((even & 0xFFFF) | ((odd >> 16) & 0xFFFF),)
    elif GROUPS == 2:
        return (tl.load(word_ptrs),)
    else:
        return tl.load(word_ptrs), tl.load(word_ptrs + stride)


@triton.jit
def load_numbers(layer, block, output, stride, FORMAT: tl.constexpr):
    """Returns the scales and zero points that `unpack` takes for a block of columns."""
    scales, zeros = (), ()
    if FORMAT.GROUP == 0:
        if FORMAT.HAS_ZEROS:
            zeros = (tl.load(layer.zeros + output),)
    elif FORMAT.IS_FLOAT and FORMAT.BITS == 8:
        scales = (tl.load(layer.scales + block.to(tl.int64) * stride + output // 128),)
    else:
        scales = _load_words(layer.scales, block, output, stride, FORMAT.GROUP, not FORMAT.IS_EARLY)
        if FORMAT.HAS_ZEROS:
            zeros = _load_words(layer.zeros, block, output, stride, FORMAT.GROUP, False)
    return Numbers(scales, zeros)


@triton.jit
def add_block(total, words, x, x_scale, numbers, FORMAT: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """Returns total [.., OUTPUT, ROW] plus the products of a block of weights and x [.., ROW, 128].
    ROWS_LEFT: x is the left operand of the tensor cores, and total [.., ROW, OUTPUT]."""
    IS_LATE: tl.constexpr = FORMAT.GROUP > 0 and not FORMAT.IS_EARLY
    if FORMAT.X_SCALES > 0:
        weight = words
    else:
        weight = unpack(words, numbers, x.dtype, FORMAT)
    if not IS_LATE and FORMAT.X_SCALES == 0:
        total = multiply(x, weight, total) if ROWS_LEFT else multiply(weight, x, total)
        return await_products(total, FORMAT)
    zero = tl.zeros_like(total)
    part = multiply(x, weight, zero) if ROWS_LEFT else multiply(weight, x, zero)
    # fused explicitly: what a compiler fuses may depend on the number of rows
    scale = tl.expand_dims(scale_of(numbers, 0, FORMAT), -2 if ROWS_LEFT else -1) if IS_LATE else 1.0
    if FORMAT.X_SCALES == 2:
        return tl.fma(part * scale, tl.broadcast_to(x_scale[None, :], total.shape), total)
    elif IS_LATE:
        return tl.fma(part, tl.broadcast_to(scale, total.shape), total)
    else:
        return total + part


def of_whole_numbers(
    bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int | None
) -> tuple[dict, torch.Tensor, torch.Tensor | None]:
    """Returns entries of `Format`, and the scales and zero points of groups as words of two."""
    constants = {
        "BITS": bits, "IS_FLOAT": False, "HAS_ZEROS": zeros is not None,
        "GROUP": 0 if group_size is None else group_size, "IS_SCALE_BF16": scales.dtype == torch.bfloat16,
        "X_SCALES": 0,
    }  # fmt: skip
    if group_size is not None:
        scales, zeros = (each if each is None else each.view(torch.int32)[..., 0] for each in (scales, zeros))
    return constants, scales, zeros


def of_device(device: torch.device) -> dict[str, bool]:
    """Returns the entries of `Format` that follow from the device."""
    name = "" if is_interpreting() else target.architecture(device)
    return {"IS_ASSEMBLED": name.startswith("sm_"), "IS_AWAITED": name == "sm_90" and not KEEPS_OPERANDS}
