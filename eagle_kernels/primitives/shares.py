"""Who attends to which keys: the prefixes of a batch, cut into shares of about equal size.

Keys are counted in tiles of BLOCK_KEY slots, from slot 0 on. A share is at most `share_tiles` tiles of one request, so
a long request has many shares and a short one has one, and requests of very different lengths end together. Shares are
numbered request by request. A program finds its own by the lengths of all requests, which it reads itself: nothing is
planned on the host, and a captured graph serves all lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.language import tl, triton
from .paging import request_pages

BLOCK_BATCH = tl.constexpr(128)


class Batch(NamedTuple):
    """What tells how many keys each request has; see `request_pages` and `prefix_range`."""

    page_indptr_ptr: Any
    lengths_ptr: Any
    qo_indptr_ptr: Any
    stride_page_table_request: Any
    table_size: Any
    batch_size: Any
    num_rows: Any  # of all requests
    num_drafts: Any  # draft keys of a request whose rows are not ragged
    reach: Any  # no query sees a slot more than this before the end of the prefix; None: all are seen


@triton.jit
def prefix_range(batch, request, PAGE_SIZE: tl.constexpr, IS_CSR: tl.constexpr, IS_DRAFT_COUNTED: tl.constexpr):
    """(first, end) int32 of the prefix slots that queries of a request, or of each of several, may see.

    IS_DRAFT_COUNTED: the filled slots include the draft block.
    """
    is_live = request < batch.batch_size
    _, _, end = request_pages(batch, request, is_live, PAGE_SIZE, IS_CSR)
    if IS_DRAFT_COUNTED:
        num_drafts = batch.num_drafts
        if batch.qo_indptr_ptr is not None:
            # all of them, those beyond max_query too: they are in the pool
            first_row = tl.load(batch.qo_indptr_ptr + request, mask=is_live, other=0).to(tl.int64)
            first_row = tl.minimum(tl.maximum(first_row, 0), batch.num_rows)
            last_row = tl.load(batch.qo_indptr_ptr + request + 1, mask=is_live, other=0).to(tl.int64)
            num_drafts = tl.maximum(tl.minimum(last_row, batch.num_rows) - first_row, 0).to(tl.int32)
        end = tl.maximum(end - num_drafts, 0)
    first = end * 0
    if batch.reach is not None:
        first = tl.maximum(end - batch.reach, 0)
    return first, end


@triton.jit
def share_tiles(
    batch,
    wanted_shares,
    MIN_TILES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    IS_DRAFT_COUNTED: tl.constexpr,
):
    """How many tiles a share has if there are to be about wanted_shares in the batch; at least MIN_TILES."""
    total = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        first, end = prefix_range(batch, request, PAGE_SIZE, IS_CSR, IS_DRAFT_COUNTED)
        total += tl.cdiv(end, BLOCK_KEY) - first // BLOCK_KEY
    return tl.maximum(tl.cdiv(tl.sum(total), wanted_shares), MIN_TILES).to(tl.int32)


@triton.jit
def cut(
    batch,
    request,
    size,
    MOST_SHARES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    IS_DRAFT_COUNTED: tl.constexpr,
):
    """(tiles of a share, number of shares) of a request, or of each of several.

    At least one share: somebody has to write the outputs. MOST_SHARES: if not 0, requests that would have more of them
    have larger ones. Then `size` is a constant and all follows from the request alone.
    """
    first, end = prefix_range(batch, request, PAGE_SIZE, IS_CSR, IS_DRAFT_COUNTED)
    num_tiles = tl.cdiv(end, BLOCK_KEY) - first // BLOCK_KEY
    own_size = num_tiles * 0 + size
    if MOST_SHARES:
        own_size = tl.maximum(own_size, tl.cdiv(num_tiles, MOST_SHARES))
    num_shares = tl.maximum(tl.cdiv(num_tiles, own_size), 1)
    return own_size, tl.where(request < batch.batch_size, num_shares, 0)


@triton.jit
def find_share(
    batch,
    share,
    size,
    MOST_SHARES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    IS_DRAFT_COUNTED: tl.constexpr,
):
    """(request int64, which of its shares) of share number `share`; the request is batch_size if there are fewer."""
    found = tl.zeros([], tl.int64)
    passed = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = cut(batch, request, size, MOST_SHARES, BLOCK_KEY, PAGE_SIZE, IS_CSR, IS_DRAFT_COUNTED)
        is_passed = (before + tl.cumsum(shares) <= share) & (request < batch.batch_size)
        found += tl.sum(is_passed.to(tl.int32))
        passed += tl.sum(tl.where(is_passed, shares, 0))
        before += tl.sum(shares)
    return found, share - passed


@triton.jit
def first_share(
    batch,
    request,
    size,
    MOST_SHARES: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    IS_DRAFT_COUNTED: tl.constexpr,
):
    """The number of a request's first share."""
    before = tl.zeros([], tl.int32)
    for start in range(0, request.to(tl.int32), BLOCK_BATCH):
        other = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        _, shares = cut(batch, other, size, MOST_SHARES, BLOCK_KEY, PAGE_SIZE, IS_CSR, IS_DRAFT_COUNTED)
        before += tl.sum(tl.where(other < request, shares, 0))
    return before
