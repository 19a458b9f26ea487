"""Bounds of what groups of tokens can reach with their noise, so that few of them have to be looked at. Each bound (see
`random.add_group_bound`) becomes an int32 whose lowest bits are its place among the others: one integer maximum then
finds a bound and whose it is. The bits that it loses this way are rounded up."""

from __future__ import annotations

from ....primitives.ordering import bits_value, ordered_bits
from ....primitives.rows import LARGEST_FINITE
from ....runtime.language import tl, triton

# Below all numbered bounds, that of -inf among them: of a group that has been looked at.
NO_BOUND = tl.constexpr(-(2**31))


@triton.jit
def number_bounds(bounds, place, NUM_PLACES: tl.constexpr):
    """Returns int32 that order as the bounds fp32 do, nearly equal ones by their place.
    Places are 0 .. NUM_PLACES - 1, a power of two."""
    return (ordered_bits(tl.minimum(bounds, LARGEST_FINITE)) & -NUM_PLACES) | place


@triton.jit
def bound_of(numbered, NUM_PLACES: tl.constexpr):
    """Returns the bounds fp32 of numbered ones, rounded up: -inf stays, and of NO_BOUND it is NaN."""
    return bits_value(numbered | (NUM_PLACES - 1))


@triton.jit
def may_win(bound, best):
    """Tells whether something below `bound` can reach the key `best`; bounds of large logits are rounded."""
    value = bits_value((best >> 32).to(tl.int32))
    return bound + tl.abs(bound) * 1e-6 >= value
