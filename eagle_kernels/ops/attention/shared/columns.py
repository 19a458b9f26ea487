"""Heads as tiles of columns: one tile, or two where that is narrower, as 64 + 32 for heads of 80 and not 128.

A device function holds such a tile as a tuple of tensors [ROW, DIM], its parts. Columns past the head are not read and
count as 0. The first part is at least 16 columns wide, as matrix products need it, the second one 32: with 16 it costs
decoding more than it saves (bench/results/NVIDIA_H200/tuning/attention_head_sizes.txt).
"""

from __future__ import annotations

from ....runtime.language import constexpr_function, next_power_of_2, tl, triton


@constexpr_function
def first_columns(head_dim: int) -> int:
    """Returns the width of the first part; where that is less than `head_dim`, a second one follows."""
    half = next_power_of_2(head_dim) // 2
    return half if rest_columns(head_dim, half) < half else max(16, 2 * half)


def num_columns(head_dim: int) -> int:
    """Returns the width of all parts."""
    return first_columns(head_dim) + rest_columns(head_dim, first_columns(head_dim))


@constexpr_function
def rest_columns(head_dim: int, first: int) -> int:
    """Returns the width of the second part after one of `first` columns; 0 if there is none."""
    return max(32, 1 << (head_dim - first - 1).bit_length()) if head_dim > first else 0


@constexpr_function
def value_columns(head_dim: int, value_dim: int) -> int:
    """Returns of how many of a key's columns those parts are that hold values, see `batch.Shape.VALUE_DIM`."""
    return first_columns(head_dim) if 0 < value_dim <= first_columns(head_dim) else head_dim


@triton.jit
def load_columns(head_ptr, row, is_row, HEAD_DIM: tl.constexpr):
    """Returns the parts of the rows int64 [ROW] of HEAD_DIM elements at head_ptr; zeros where is_row is False."""
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    REST: tl.constexpr = rest_columns(HEAD_DIM, FIRST)
    first = _load_part(head_ptr, row, is_row, 0, HEAD_DIM, FIRST)
    if REST > 0:
        return (first, _load_part(head_ptr, row, is_row, FIRST, HEAD_DIM, REST))
    else:
        return (first,)


@triton.jit
def _load_part(head_ptr, row, is_row, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    in_bounds = is_row[:, None]
    if HEAD_DIM < FIRST + WIDTH:
        in_bounds &= (column < HEAD_DIM)[None, :]
    return tl.load(head_ptr + row[:, None] * HEAD_DIM + column[None, :], mask=in_bounds, other=0.0)


@triton.jit
def leading_columns(parts, WIDTH: tl.constexpr):
    """Returns those of the parts that hold the first WIDTH columns."""
    if parts[0].shape[1] >= WIDTH:
        return (parts[0],)
    else:
        return parts


@triton.jit
def store_columns(head_ptr, row, is_row, parts, HEAD_DIM: tl.constexpr):
    """Stores the parts, in the type that head_ptr has."""
    first = 0
    for index in tl.static_range(len(parts)):
        column = first + tl.arange(0, parts[index].shape[1])
        in_bounds = is_row[:, None] & (column < HEAD_DIM)[None, :]
        part = parts[index].to(head_ptr.dtype.element_ty)
        tl.store(head_ptr + row[:, None] * HEAD_DIM + column[None, :], part, mask=in_bounds)
        first += parts[index].shape[1]


@triton.jit
def spread_columns(parts, member, JOINED: tl.constexpr):
    """Returns rows for JOINED KV heads that are read as one: those of head `member` [ROW] in its columns, beside zeros.

    So a row's logits are those of its own head, and few rows with narrow heads fill the tiles of the tensor cores.
    """
    if JOINED == 1:
        return parts
    else:
        is_own = member[:, None, None] == tl.arange(0, JOINED)[None, :, None]
        spread = tl.where(is_own, parts[0][:, None, :], 0.0)
        return (tl.reshape(spread, [spread.shape[0], JOINED * parts[0].shape[1]]),)


@triton.jit
def gather_columns(parts, member, JOINED: tl.constexpr):
    """Returns of rows for JOINED KV heads the columns of each one's own head `member` [ROW]."""
    if JOINED == 1:
        return parts
    else:
        is_own = member[:, None, None] == tl.arange(0, JOINED)[None, :, None]
        spread = tl.reshape(parts[0], [parts[0].shape[0], JOINED, parts[0].shape[1] // JOINED])
        return (tl.sum(tl.where(is_own, spread, 0.0), axis=1),)


@triton.jit
def convert_columns(parts, DTYPE: tl.constexpr):
    """Returns the parts in another type; int8 becomes fp16 by bits, since GPUs convert few integers at once."""
    converted = ()
    for index in tl.static_range(len(parts)):
        if parts[index].dtype.is_int8() and DTYPE.is_fp16():
            # the low bits of 1024.0 count by 1: 1024 + 128 + x, of which the subtraction is exact
            bits = (parts[index].to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
            converted += (bits.to(tl.float16, bitcast=True) - 1152.0,)
        else:
            converted += (parts[index].to(DTYPE),)
    return converted


@triton.jit
def scale_columns(parts, factor):
    """Returns the parts, each times a factor that broadcasts to it."""
    scaled = ()
    for index in tl.static_range(len(parts)):
        scaled += (parts[index] * factor,)
    return scaled
