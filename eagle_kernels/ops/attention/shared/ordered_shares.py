"""Cuts the keys of a request into shares that follow from positions alone, so that a row's bits depend on no batch.

Keys are counted in tiles of BLOCK_KEY slots, from slot 0 on; the draft block comes after the prefix. Sums are taken
within a share in the order of positions, and shares are merged in theirs: wherever a request ends, and whatever else is
in the batch, a row's bits are the same.
"""

from __future__ import annotations

from ....runtime.language import tl, triton
from .batch import slot_range

# reductions stay within a warp and need no barrier
BLOCK_BATCH = tl.constexpr(32)


@triton.jit
def ordered_share(index, BASE_TILES: tl.constexpr):
    """Returns (first tile, tiles) of the shares that follow from positions alone: those of `deterministic` calls.

    Wherever a request ends, share `index` is the same. The first 16 have BASE_TILES tiles; from then on each 8 have
    twice the 8 before, so that long requests do not have too many.
    """
    octave = tl.maximum(index // 8 - 1, 0)
    return (index - 8 * octave) * (BASE_TILES << octave), BASE_TILES << octave


@triton.jit
def ordered_share_of(tile, BASE_TILES: tl.constexpr):
    """Returns which of these shares a tile belongs to."""
    unit = tile // BASE_TILES
    octave = tile * 0
    for doubling in tl.static_range(20):
        octave += (unit >= (16 << doubling)).to(tl.int32)
    return (unit >> octave) + 8 * octave


def count_ordered_shares(num_tiles: int, base_tiles: int) -> int:
    """Returns how many of these shares the tiles take."""
    units = max(triton.cdiv(num_tiles, base_tiles), 1)
    octave = max((units - 1).bit_length() - 4, 0)
    return ((units - 1) >> octave) + 8 * octave + 1


@triton.jit
def request_shares(batch, request, SHAPE: tl.constexpr):
    """Returns (first share, number of shares) of a request, or of each of several.

    The first share is not 0 where a window lets no row see the keys before. There is at least one share, since a
    program has to write the outputs.
    """
    first, _, stop = slot_range(batch, request, SHAPE)
    first_tile = first // SHAPE.BLOCK_KEY
    first_share = ordered_share_of(first_tile, SHAPE.SHARE_TILES)
    last_share = ordered_share_of(tl.maximum(tl.cdiv(stop, SHAPE.BLOCK_KEY) - 1, first_tile), SHAPE.SHARE_TILES)
    return first_share, tl.where(request < batch.batch_size, last_share - first_share + 1, 0)


@triton.jit
def find_share(batch, share, SHAPE: tl.constexpr):
    """Returns (request int64, which of its shares) of share number `share`; request batch_size if there are fewer."""
    found = tl.zeros([], tl.int64)
    passed = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = request_shares(batch, request, SHAPE)
        is_passed = (before + tl.cumsum(shares) <= share) & (request < batch.batch_size)
        found += tl.sum(is_passed.to(tl.int32))
        passed += tl.sum(tl.where(is_passed, shares, 0))
        before += tl.sum(shares)
    return found, share - passed


@triton.jit
def count_shares_before(batch, request, SHAPE: tl.constexpr):
    """Returns how many shares the requests before one have."""
    before = tl.zeros([], tl.int32)
    for start in range(0, request, BLOCK_BATCH):
        other = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = request_shares(batch, other, SHAPE)
        before += tl.sum(tl.where(other < request, shares, 0))
    return before


@triton.jit
def find_path_share(batch, request, number, SHAPE: tl.constexpr):
    """Returns (share, which of the request's) of an ordered share: `number` after that in which the prefix ends."""
    before = count_shares_before(batch, request, SHAPE)
    first, prefix, _ = slot_range(batch, request, SHAPE)
    first_share = ordered_share_of(first // SHAPE.BLOCK_KEY, SHAPE.SHARE_TILES)
    index = ordered_share_of(prefix // SHAPE.BLOCK_KEY, SHAPE.SHARE_TILES) - first_share + number
    return before + index, index
