"""Rows of queries attend to a share of their request's prefix, and to the draft block behind it.

Most tiles of a prefix are seen by all rows, from the first key to the last: they take a loop of their own, without any
mask, whose loads run ahead. What is left are the edges: tiles that a sliding window cuts, the last tile of a share, and
the draft block under its mask. They are few, and all of them take one second loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.language import tl, triton
from .paging import find_pages
from .softmax import attend


class Pool(NamedTuple):
    """The keys and values as one program reads them: one request's pages, or rows one after another, of one head.

    Without pages (PAGE_SIZE 0) a slot is a row: first_page is the request's first one, page_count their number, and the
    strides are those of a row.
    """

    k_cache_ptr: Any
    v_cache_ptr: Any
    page_table_ptr: Any
    first_page: Any
    page_count: Any
    num_pages: Any
    stride_k_page: Any  # in rows of HEAD_DIM
    stride_v_page: Any
    kv_head: Any


class Drafts(NamedTuple):
    """The draft block of one request. Its keys lie in the pool, behind the prefix, or in tensors of their own."""

    key_ptr: Any  # at the request's first; None: in the pool
    value_ptr: Any
    stride_key: Any  # of a token, in rows of HEAD_DIM
    stride_value: Any
    mask_ptr: Any  # [ROW] pointers to each row's words int64; None: causal
    positions_ptr: Any  # at that of the request's first key; None: they follow the prefix
    num_keys: Any  # 0 for shares that do not have the block
    slots_end: Any  # of the pool: slots from here on do not exist


class Queries(NamedTuple):
    """A tile of rows: (token, head of the group), the head fastest."""

    query: Any  # [ROW, DIM]
    is_row: Any
    last_draft: Any  # causal: the last draft key that each row sees
    position: Any  # int32; of no meaning without a window


class Span(NamedTuple):
    """The slots of a share, first..stop - 1, and which of them a row sees.

    Slots from common_stop on are seen up to each row's own position, those before it by all rows; a window takes away
    the oldest ones.
    """

    first: Any
    stop: Any
    common_stop: Any
    prefix: Any  # where the draft block begins
    window: Any  # how many keys a row sees; None: all


class Scales(NamedTuple):
    """Factors of logits in base 2, by keys of the pool and of separate drafts; of the pool's values; see `attend`."""

    pool: Any
    drafts: Any
    value: Any
    soft_cap: Any


@triton.jit
def attend_span(
    queries,
    pool,
    drafts,
    span,
    scales,
    row_max,
    row_sum,
    accumulator,
    IS_ORDERED: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The rows' state after the span and the draft block.

    IS_ORDERED: all tiles in the order of their keys, so that a row's bits do not depend on what other rows see.
    """
    lane = tl.arange(0, BLOCK_KEY)
    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < HEAD_DIM)[None, :]
    aligned = span.first // BLOCK_KEY * BLOCK_KEY
    seen_from = span.first  # by all rows
    if span.window is not None:
        # not below 0, where the largest window would wrap around
        last_position = tl.maximum(tl.max(tl.where(queries.is_row, queries.position, 0)), 0)
        seen_from = tl.maximum(seen_from, last_position - span.window + 1)
    body_begin = tl.cdiv(seen_from, BLOCK_KEY) * BLOCK_KEY
    body_end = tl.minimum(span.stop, span.common_stop) // BLOCK_KEY * BLOCK_KEY
    has_body = (body_begin < body_end) & (not IS_ORDERED)
    body_begin = tl.where(has_body, body_begin, aligned)
    body_end = tl.where(has_body, body_end, aligned)

    page = _load_page(pool, body_begin, body_end, PAGE_SIZE, BLOCK_KEY)
    for start in range(body_begin, body_end, BLOCK_KEY):
        key_row, value_row = _slot_rows(pool, page, start + lane, PAGE_SIZE, NUM_KV_HEADS)
        # one tile ahead: else every tile would wait for its pages before it could ask for its keys
        page = _load_page(pool, start + BLOCK_KEY, body_end, PAGE_SIZE, BLOCK_KEY)
        key = tl.load(pool.k_cache_ptr + key_row[:, None] * HEAD_DIM + column[None, :], mask=is_column, other=0.0)
        value = tl.load(pool.v_cache_ptr + value_row[:, None] * HEAD_DIM + column[None, :], mask=is_column, other=0.0)
        row_max, row_sum, accumulator = attend(
            queries.query, key, value, None, scales.pool, scales.value, scales.soft_cap, row_max, row_sum, accumulator,
            IS_WIDENED,
        )  # fmt: skip

    num_heads = (body_begin - aligned) // BLOCK_KEY  # tiles before the body
    num_edges = num_heads + tl.maximum(tl.cdiv(span.stop - body_end, BLOCK_KEY), 0)
    # few, so that nothing runs ahead; but in order all tiles are edges
    STAGES: tl.constexpr = None if IS_ORDERED else 1
    for index in tl.range(0, num_edges + tl.cdiv(drafts.num_keys, BLOCK_KEY), num_stages=STAGES):
        is_draft = index >= num_edges
        place = aligned + index * BLOCK_KEY + tl.where(index >= num_heads, body_end - body_begin, 0) + lane
        first_draft = (index - num_edges) * BLOCK_KEY
        draft = first_draft + lane
        slot = tl.where(is_draft, span.prefix + draft, place)
        is_seen = _visible(queries, drafts, span, first_draft, slot, is_draft, BLOCK_KEY)
        is_wanted = tl.max(is_seen.to(tl.int32), axis=0) != 0
        is_pooled = (drafts.key_ptr is None) | (not is_draft)
        edge_page, exists = find_pages(pool, slot, is_wanted & (slot < drafts.slots_end) & is_pooled, PAGE_SIZE)
        key_row, value_row = _slot_rows(pool, edge_page, slot, PAGE_SIZE, NUM_KV_HEADS)
        is_read = exists[:, None] & is_column
        key = tl.load(pool.k_cache_ptr + key_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0)
        value = tl.load(pool.v_cache_ptr + value_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0)
        key, value = key.to(queries.query.dtype), value.to(queries.query.dtype)
        scale, value_scale = scales.pool, scales.value
        if drafts.key_ptr is not None:
            if is_draft:
                exists = is_wanted
                is_read = exists[:, None] & is_column
                key_row = draft.to(tl.int64) * drafts.stride_key + pool.kv_head
                value_row = draft.to(tl.int64) * drafts.stride_value + pool.kv_head
                key = tl.load(drafts.key_ptr + key_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0)
                value = tl.load(
                    drafts.value_ptr + value_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0
                )
            scale = tl.where(is_draft, scales.drafts, scales.pool)
            if value_scale is not None:
                value_scale = tl.where(is_draft, 1.0, value_scale)
        row_max, row_sum, accumulator = attend(
            queries.query, key, value, is_seen & exists[None, :], scale, value_scale, scales.soft_cap, row_max, row_sum,
            accumulator, IS_WIDENED,
        )  # fmt: skip
    return row_max, row_sum, accumulator


@triton.jit
def _load_page(pool, start, end, PAGE_SIZE: tl.constexpr, BLOCK_KEY: tl.constexpr):
    """The page ids int64 of the tile of slots from `start` on: one where a tile lies on one page, else one per slot.

    Ids outside the pool are moved into it: what they hold is then read in place of nothing.
    """
    if PAGE_SIZE == 0:
        return tl.zeros([], tl.int64)
    else:
        table_ptr = pool.page_table_ptr + pool.first_page
        if PAGE_SIZE >= BLOCK_KEY:
            page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < end, other=0)
        else:
            slot = start + tl.arange(0, BLOCK_KEY)
            page = tl.load(table_ptr + slot // PAGE_SIZE, mask=slot < end, other=0)
        return tl.minimum(tl.maximum(page.to(tl.int64), 0), pool.num_pages - 1)


@triton.jit
def _slot_rows(pool, page, slot, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """Where the keys and the values of slots lie, int64 in rows of HEAD_DIM."""
    if PAGE_SIZE == 0:
        row = pool.first_page + slot
        return row * pool.stride_k_page + pool.kv_head, row * pool.stride_v_page + pool.kv_head
    else:
        row = slot % PAGE_SIZE * NUM_KV_HEADS + pool.kv_head
        return page * pool.stride_k_page + row, page * pool.stride_v_page + row


@triton.jit
def _visible(queries, drafts, span, first_draft, slot, is_draft, BLOCK_KEY: tl.constexpr):
    """bool [ROW, KEY]: which rows see which keys of a tile of slots or, where is_draft, of draft keys."""
    draft = first_draft + tl.arange(0, BLOCK_KEY)
    is_key = tl.where(is_draft, draft < drafts.num_keys, (slot >= span.first) & (slot < span.stop))
    is_seen = queries.is_row[:, None] & is_key[None, :]
    is_seen &= is_draft | (slot < span.common_stop)[None, :] | (slot[None, :] <= queries.position[:, None])
    if drafts.mask_ptr is not None:
        if BLOCK_KEY <= 64:  # a tile lies within one word
            word = tl.load(drafts.mask_ptr + first_draft // 64, mask=queries.is_row & is_draft, other=-1)[:, None]
        else:
            word = tl.load(drafts.mask_ptr[:, None] + (draft // 64)[None, :], mask=is_seen & is_draft, other=-1)
        is_seen &= ((word >> (draft & 63).to(tl.int64)[None, :]) & 1) != 0
    else:
        is_seen &= (draft[None, :] <= queries.last_draft[:, None]) | (not is_draft)
    if span.window is not None:
        position = slot
        if drafts.positions_ptr is not None:
            drafted = tl.load(drafts.positions_ptr + draft, mask=is_key & is_draft, other=0).to(tl.int32)
            position = tl.where(is_draft, drafted, slot)
        is_seen &= queries.position[:, None] - position[None, :] < span.window
    return is_seen


@triton.jit
def request_rows(qo_indptr_ptr, request, num_query, num_rows):
    """(first row int64 of the flat [rows, heads], how many tokens int32) of a request's queries."""
    if qo_indptr_ptr is None:
        return request * num_query, num_query
    else:
        first = tl.minimum(tl.maximum(tl.load(qo_indptr_ptr + request).to(tl.int64), 0), num_rows)
        last = tl.minimum(tl.maximum(tl.load(qo_indptr_ptr + request + 1).to(tl.int64), first), num_rows)
        return first, tl.minimum(last - first, num_query).to(tl.int32)
