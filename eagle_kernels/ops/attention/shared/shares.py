"""Divides the keys of a batch among programs: its slots, cut into shares of about equal size.

Keys are counted in tiles of BLOCK_KEY slots, from slot 0 on; the draft block comes after the prefix. A share is at most
`share_tiles` tiles of one request, so a long request has many shares and a short one has one, and requests of very
different lengths end together. Shares are numbered request by request. A program finds its share from the lengths of
all requests, which it reads itself: nothing is planned on the host, and a captured graph serves all lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .paged_cache import request_pages

# reductions stay within a warp and need no barrier
BLOCK_BATCH = tl.constexpr(32)


class Batch(NamedTuple):
    """What determines how many keys each request has; see `request_pages` and `slot_range`."""

    page_indptr_ptr: Any
    lengths_ptr: Any
    qo_indptr_ptr: Any
    stride_page_table_request: Any
    table_size: Any
    batch_size: Any
    num_query: Any  # rows of a request, at most
    num_rows: Any  # of all requests
    num_drafts: Any  # draft keys of a request whose rows are not ragged
    reach: Any  # no query sees a slot more than this before the end of the prefix; None: they see all


@triton.jit
def slot_range(
    batch, request, DRAFTS: tl.constexpr, BLOCK_KEY: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CSR: tl.constexpr
):
    """Returns (first, prefix, stop) int32 of a request, or of each of several.

    Prefix slots first..prefix - 1 may be seen, and the draft block ends at stop - 1. DRAFTS says where the block is: ""
    nowhere, "counted" among the filled slots, "behind" them in the pool, or "beside" them in tensors of its own, with
    slots from the next multiple of BLOCK_KEY on.
    """
    is_live = request < batch.batch_size
    _, page_count, filled = request_pages(batch, request, is_live, PAGE_SIZE, IS_CSR)
    prefix, stop = filled, filled
    if DRAFTS != "":
        num_drafts, num_counted = batch.num_drafts, batch.num_drafts
        if batch.qo_indptr_ptr is not None:
            first_row = tl.load(batch.qo_indptr_ptr + request, mask=is_live, other=0).to(tl.int64)
            first_row = tl.minimum(tl.maximum(first_row, 0), batch.num_rows)
            last_row = tl.load(batch.qo_indptr_ptr + request + 1, mask=is_live, other=0).to(tl.int64)
            # drafts past max_query are in the pool too
            num_counted = tl.maximum(tl.minimum(last_row, batch.num_rows) - first_row, 0).to(tl.int32)
            num_drafts = tl.minimum(num_counted, batch.num_query)
        if DRAFTS == "counted":
            prefix = tl.maximum(filled - num_counted, 0)
            stop = tl.minimum(prefix + num_drafts, filled)
        elif DRAFTS == "behind":
            stop = tl.minimum(prefix + num_drafts, page_count * PAGE_SIZE)
        else:
            # a request that does not exist counts nothing
            stop = tl.cdiv(prefix, BLOCK_KEY) * BLOCK_KEY + tl.where(is_live, num_drafts, 0)
    first = prefix * 0
    if batch.reach is not None:
        first = tl.maximum(prefix - batch.reach, 0)
    return first, prefix, stop


@triton.jit
def share_tiles(
    batch,
    wanted_shares,
    MIN_TILES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
):
    """Returns how many tiles a share has, at least MIN_TILES, to cut the batch into about wanted_shares."""
    total = tl.zeros([BLOCK_BATCH], tl.int32)  # `check_cache` ensures that this is enough
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        first, _, stop = slot_range(batch, request, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        total += tl.cdiv(stop, BLOCK_KEY) - first // BLOCK_KEY
    return tl.maximum(tl.cdiv(tl.sum(total), wanted_shares), MIN_TILES)


@triton.jit
def ordered_share(index, BASE_TILES: tl.constexpr):
    """Returns (first tile, tiles) of the shares that follow from positions alone: those of `deterministic` calls.

    Wherever a request ends, share `index` is the same. The first 16 have BASE_TILES tiles; from then on each 8 have
    twice as many as the 8 before, so that long requests do not have too many.
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
    """Returns how many of these shares as many tiles take."""
    units = max(triton.cdiv(num_tiles, base_tiles), 1)
    octave = max((units - 1).bit_length() - 4, 0)
    return ((units - 1) >> octave) + 8 * octave + 1


def count_shares(
    cache: dict,
    batch_size: int,
    drafts: str,
    num_drafts: int,
    block_key: int,
    least_tiles: int,
    wanted_shares: int,
    is_ordered: bool,
) -> int:
    """Returns the most shares that requests of these page tables, the arguments of `cache_arguments`, can have."""
    # from the most pages; in the CSR form all requests have these together
    most_tiles = triton.cdiv(cache["table_size"] * cache["PAGE_SIZE"], block_key)
    draft_tiles = triton.cdiv(num_drafts, block_key) if drafts == "beside" else 0
    if cache["IS_CSR"]:
        if drafts == "beside":  # after a tile that the prefix does not fill
            most_tiles += batch_size * (1 + draft_tiles)
        num_shares = batch_size + max(1, triton.cdiv(most_tiles, least_tiles)) - 1
    else:
        num_shares = batch_size * max(1, triton.cdiv(most_tiles + draft_tiles, least_tiles))
    if is_ordered:
        return min(num_shares, batch_size * count_ordered_shares(most_tiles + draft_tiles, least_tiles))
    return min(num_shares, wanted_shares + batch_size - 1)


@triton.jit
def cut(
    batch,
    request,
    size,
    IS_ORDERED: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
):
    """Returns (tiles of a share, number of shares) of a request, or of each of several.

    There is at least one share, since a program has to write the outputs. size: how many tiles a share has at most;
    IS_ORDERED: BASE_TILES of `ordered_share`, a constant. Then, in place of the tiles of a share, it returns the number
    of the request's first share: it is not 0 where a window lets no row see the keys before.
    """
    first, _, stop = slot_range(batch, request, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    first_tile = first // BLOCK_KEY
    num_tiles = tl.cdiv(stop, BLOCK_KEY) - first_tile
    if IS_ORDERED:
        first_share = ordered_share_of(first_tile, size)
        last_share = ordered_share_of(tl.maximum(tl.cdiv(stop, BLOCK_KEY) - 1, first_tile), size)
        return first_share, tl.where(request < batch.batch_size, last_share - first_share + 1, 0)
    else:
        # as even as possible: a small last share would still need its program
        own_size = tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, size), 1))
        num_shares = tl.maximum(tl.cdiv(num_tiles, tl.maximum(own_size, 1)), 1)
        return own_size, tl.where(request < batch.batch_size, num_shares, 0)


@triton.jit
def find_share(
    batch,
    share,
    size,
    IS_ORDERED: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
):
    """Returns (request int64, which of its shares) of share number `share`; request batch_size if there are fewer."""
    found = tl.zeros([], tl.int64)
    passed = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = cut(batch, request, size, IS_ORDERED, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        is_passed = (before + tl.cumsum(shares) <= share) & (request < batch.batch_size)
        found += tl.sum(is_passed.to(tl.int32))
        passed += tl.sum(tl.where(is_passed, shares, 0))
        before += tl.sum(shares)
    return found, share - passed


@triton.jit
def find_path_share(
    batch,
    request,
    number,
    size,
    DRAFTS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
):
    """Returns (share, which of the request's) of an ordered share: `number` after that in which the prefix ends."""
    before = tl.zeros([], tl.int32)
    for start in range(0, request, BLOCK_BATCH):
        other = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = cut(batch, other, size, True, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        before += tl.sum(tl.where(other < request, shares, 0))
    first, prefix, _ = slot_range(batch, request, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    index = ordered_share_of(prefix // BLOCK_KEY, size) - ordered_share_of(first // BLOCK_KEY, size) + number
    return before + index, index
