"""Moves heads from one place to another and turns them by rotary position embedding: what rope and write_kv share.

A head's first rotary_dim coordinates turn in pairs, pair i of a token at position t by the angle whose cosine and sine
stand in row t, column i of two tables; the other coordinates stay. Two layouts of pairs are in use:

    halves       coordinates i and rotary_dim / 2 + i     GPT-NeoX, Llama (Hugging Face's rotate_half)
    interleaved  coordinates 2 i and 2 i + 1              GPT-J, Cohere (Hugging Face's rotate_every_two)

first * cos - second * sin and second * cos + first * sin follow PyTorch's rules of types: with tables of the heads' own
dtype every product is rounded to it, as in Hugging Face's models; with fp32 tables all is fp32 up to one rounding at
the end. Kernels that rotate are compiled without fusing products into sums (`enable_fp_fusion=False`): bits are
PyTorch's.
"""

from typing import Any, NamedTuple

import torch

from ..runtime import check
from ..runtime.language import next_power_of_2, tl, triton
from .fp8 import encode_e4m3, encode_int8
from .paging import check_row_strides
from .strides import check_tokens, of_token, token_arguments

MAX_HEAD_DIM = 1024


class Tables(NamedTuple):
    """Pointers to the tables of angles, and to the positions of the tokens in them; None: no tables."""

    cos: Any
    sin: Any
    positions: Any


class TableSizes(NamedTuple):
    """The sizes of tables that `table_arguments` describes; num_positions: rows of the tables."""

    num_positions: Any
    stride_cos_position: Any
    stride_sin_position: Any
    num_positions_columns: Any
    stride_positions_row: Any
    stride_positions_column: Any


# for do_not_specialize: of rows that begin at multiples of 16, angles are read by wide instructions
TABLE_NUMBERS = [name for name in TableSizes._fields if name not in ("stride_cos_position", "stride_sin_position")]


class Angles(NamedTuple):
    """The angles by which one token's heads turn."""

    cos: Any  # [PAIR]
    sin: Any  # [PAIR]
    is_known: Any  # whether the tables have the token's position; heads of other tokens stay as they are


@triton.jit
def load_angles(tables, sizes, token, ROTARY_DIM: tl.constexpr):
    """Returns the angles of one token; without tables (ROTARY_DIM 0) what `move_heads` does not read."""
    if ROTARY_DIM > 0:
        pair = tl.arange(0, next_power_of_2(ROTARY_DIM // 2))
        place = of_token(token, sizes.num_positions_columns, sizes.stride_positions_row, sizes.stride_positions_column)
        position = tl.load(tables.positions + place).to(tl.int64)
        is_known = (position >= 0) & (position < sizes.num_positions)
        in_bounds = is_known & (pair < ROTARY_DIM // 2)
        cos = tl.load(tables.cos + position * sizes.stride_cos_position + pair, mask=in_bounds, other=0.0)
        sin = tl.load(tables.sin + position * sizes.stride_sin_position + pair, mask=in_bounds, other=0.0)
        return Angles(cos, sin, is_known)
    else:
        return Angles(0.0, 0.0, False)


@triton.jit
def _product(left, right, dtype: tl.constexpr):
    """Returns left * right in fp32, rounded to dtype in between."""
    return (left * right).to(dtype).to(tl.float32)


@triton.jit
def _rotate(first, second, cos, sin):
    """Returns the turned pair, in the dtype of the heads."""
    heads_dtype: tl.constexpr = first.dtype
    tables_dtype: tl.constexpr = cos.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    turned_first = _product(first, cos, tables_dtype) - _product(second, sin, tables_dtype)
    turned_second = _product(second, cos, tables_dtype) + _product(first, sin, tables_dtype)
    return turned_first.to(heads_dtype), turned_second.to(heads_dtype)


@triton.jit
def _store(place_ptr, value, mask, scale, FP8_BIAS: tl.constexpr):
    """Stores value, or value / scale as int8 or as bytes of an 8-bit float."""
    if place_ptr.dtype.element_ty == tl.int8:
        tl.store(place_ptr, encode_int8(tl.math.div_rn(value.to(tl.float32), scale)), mask=mask)
    elif FP8_BIAS == 0:
        tl.store(place_ptr, value, mask=mask)
    else:
        value = tl.math.div_rn(value.to(tl.float32), scale)
        tl.store(place_ptr, encode_e4m3(value, FP8_BIAS), mask=mask)


@triton.jit
def move_heads(
    source_ptr, target_ptr, source_row, target_row, is_head, is_written, angles, scale,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, FP8_BIAS: tl.constexpr,
):  # fmt: skip
    """Moves heads [HEAD] from row source_row to row target_row, both int64, a row being HEAD_DIM elements.
    is_written: whether they have a target; they are read meanwhile, before that is known.
    scale: [HEAD, 1] or a number, of targets of 8 bits. FP8_BIAS: of the 8-bit float to write; 0: elements keep their
    dtype, unscaled, unless the target is int8. Source and target may be the same: a program reads an element before it
    writes there, and no other program reads it."""
    source_ptr += source_row[:, None] * HEAD_DIM
    target_ptr += target_row[:, None] * HEAD_DIM
    is_head = is_head[:, None]
    if ROTARY_DIM > 0:
        NUM_PAIRS: tl.constexpr = next_power_of_2(ROTARY_DIM // 2)
        cos, sin = angles.cos[None, :], angles.sin[None, :]
        if IS_INTERLEAVED:  # neighbours are moved together: by wide instructions
            column = tl.arange(0, 2 * NUM_PAIRS)[None, :]
            in_bounds = is_head & (column < ROTARY_DIM)
            both = tl.load(source_ptr + column, mask=in_bounds)  # [HEAD, 2 * PAIR]
            first, second = tl.split(tl.reshape(both, (both.shape[0], NUM_PAIRS, 2)))
            turned = tl.reshape(tl.join(*_rotate(first, second, cos, sin)), both.shape)
            turned = tl.where(angles.is_known, turned, both)
            _store(target_ptr + column, turned, in_bounds & is_written, scale, FP8_BIAS)
        else:
            pair = tl.arange(0, NUM_PAIRS)[None, :]
            in_bounds = is_head & (pair < ROTARY_DIM // 2)
            first = tl.load(source_ptr + pair, mask=in_bounds)  # [HEAD, PAIR]
            second = tl.load(source_ptr + ROTARY_DIM // 2 + pair, mask=in_bounds)
            turned_first, turned_second = _rotate(first, second, cos, sin)
            turned_first = tl.where(angles.is_known, turned_first, first)
            turned_second = tl.where(angles.is_known, turned_second, second)
            in_bounds &= is_written
            _store(target_ptr + pair, turned_first, in_bounds, scale, FP8_BIAS)
            _store(target_ptr + ROTARY_DIM // 2 + pair, turned_second, in_bounds, scale, FP8_BIAS)
    if ROTARY_DIM < HEAD_DIM:
        column = ROTARY_DIM + tl.arange(0, next_power_of_2(HEAD_DIM - ROTARY_DIM))[None, :]
        in_bounds = is_head & (column < HEAD_DIM)
        value = tl.load(source_ptr + column, mask=in_bounds)  # [HEAD, column]
        _store(target_ptr + column, value, in_bounds & is_written, scale, FP8_BIAS)


def check_heads(args: check.Arguments, name: str, heads: str, dtypes) -> torch.Tensor:
    """Checks a tensor [T, heads, D]; tokens and heads may be strided by whole rows of D, as in a fused projection."""
    value = args.tensor(name, ("T", heads, "D"), dtypes, contiguous=1)
    if not 1 <= args.size("D") <= MAX_HEAD_DIM:
        args.fail(name, f"have D in 1..{MAX_HEAD_DIM}", args.size("D"))
    check_row_strides(args, name, value, 2)
    return value


def check_out(op: str, **heads: torch.Tensor) -> None:
    """Checks that the caller's buffers too are strided by whole rows of D."""
    for name, value in heads.items():
        check_row_strides(check.Arguments(op, {}), name, value, 2)


def check_tables(args: check.Arguments, dtype: torch.dtype) -> None:
    """Checks positions, cos and sin for heads of this dtype; T and D are bound before."""
    check_tokens(args, "positions")
    dtypes = (dtype,) if dtype == torch.float32 else (dtype, torch.float32)
    cos = args.tensor("cos", ("max_positions", "rotary_dim / 2"), dtypes, contiguous=1)
    args.tensor("sin", ("max_positions", "rotary_dim / 2"), (cos.dtype,), contiguous=1)
    num_pairs = args.size("rotary_dim / 2")
    if not 1 <= num_pairs <= args.size("D") // 2:
        args.fail("cos", f"have 1..D / 2 = {args.size('D') // 2} columns, one for each pair", num_pairs)


def head_strides(name: str, heads: torch.Tensor) -> dict[str, int]:
    """Returns the strides of heads [T, heads, D] as kernels take them: in rows of D."""
    head_dim = heads.shape[2]
    return {f"stride_{name}_token": heads.stride(0) // head_dim, f"stride_{name}_head": heads.stride(1) // head_dim}


def table_arguments(positions: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None) -> dict:
    """Returns the launch arguments that describe checked tables, or that there are none."""
    return {
        "tables": Tables(cos, sin, positions), **token_arguments("positions", positions),
        "num_positions": 0 if cos is None else cos.shape[0], "ROTARY_DIM": 0 if cos is None else 2 * cos.shape[1],
        "stride_cos_position": 0 if cos is None else cos.stride(0),
        "stride_sin_position": 0 if sin is None else sin.stride(0),
    }  # fmt: skip


def tile_of_heads(num_heads: int, head_dim: int, tile_elements: int) -> int:
    """Returns how many heads a program moves: a power of two, about tile_elements elements in all."""
    return max(1, min(next_power_of_2(num_heads), tile_elements // next_power_of_2(head_dim)))
