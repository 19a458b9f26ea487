"""The argmax of a long row that several programs share: each finds the key of its slice, the largest key names the id.

Keys (`ordering.py`) compare as (value, lowest id), so the result does not depend on how a row was cut.
"""

from __future__ import annotations

from ..runtime.language import tl, triton
from .ordering import comparable, key_id, ordered_key


@triton.jit
def slice_key(row_ptr, slice_index, SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The key of the largest of the BLOCK values of slice `slice_index`; NaN counts as -inf, ties go to the lowest id.

    Each lane keeps the best of every LANES-th value, so that a slice may be longer than the registers hold. A slice
    begins within the row, so one of nothing but -inf and NaN gives the id of its first value.
    """
    first = slice_index * BLOCK + tl.arange(0, LANES)
    value, index = _load_ordered(row_ptr, first, SIZE), first
    for start in tl.static_range(LANES, BLOCK, LANES):
        other = _load_ordered(row_ptr, first + start, SIZE)
        index = tl.where(other > value, first + start, index)
        value = tl.maximum(value, other)
    largest = tl.max(value)
    lowest = tl.min(tl.where(value == largest, index, 2147483647))
    return ordered_key(comparable(largest), lowest)


@triton.jit
def winner(keys):
    """The id int32 that the largest of a row's keys [...] names."""
    return key_id(keys).to(tl.int32)


@triton.jit
def _load_ordered(row_ptr, index, SIZE: tl.constexpr):
    value = tl.load(row_ptr + index, mask=index < SIZE, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))
