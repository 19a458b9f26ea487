"""The argmax of a long row that several programs share: each finds the key of its slice, the largest key names the id.
Keys (`ordering.py`) compare as (value, lowest id), so the result does not depend on how a row was cut."""

from __future__ import annotations

from ....primitives.ordering import comparable, key_id, ordered_key, widened
from ....runtime.language import tl, triton


@triton.jit
def slice_key(row_ptr, slice_index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the key of the largest of the BLOCK values of slice `slice_index`. NaN counts as -inf, and ties go to the
    lowest id. Only maxima are taken of all values (two instructions each); the id is looked up in the group of eight
    that holds the largest, which is read again. A slice begins within the row, so one of nothing but -inf and NaN gives
    the id of its first value."""
    index = slice_index * BLOCK + tl.arange(0, BLOCK)
    value = widened(tl.load(row_ptr + index, mask=index < SIZE, other=float("-inf")))
    # a maximum passes NaN over where it can
    group_max = tl.max(tl.reshape(value, [BLOCK // 8, 8]), axis=1)
    group_max = tl.where(group_max == group_max, group_max, float("-inf"))
    largest = tl.max(group_max)
    group = tl.min(tl.where(group_max == largest, tl.arange(0, BLOCK // 8), BLOCK))
    index = slice_index * BLOCK + group * 8 + tl.arange(0, 8)
    value = widened(tl.load(row_ptr + index, mask=index < SIZE, other=float("-inf")))
    value = tl.where(value == value, value, float("-inf"))
    return ordered_key(comparable(largest), tl.min(tl.where(value == largest, index, 2147483647)))


@triton.jit
def winner(keys):
    """Returns the id int32 that the largest of a row's keys [...] names."""
    return key_id(keys).to(tl.int32)
