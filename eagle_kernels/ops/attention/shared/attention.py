"""Lets rows of queries attend to a span of slots: a loop over tiles of keys, which masks only the tiles that need it.

Nearly all tiles of a prefix are seen by all rows, from the first key to the last. The others are at the edges: where a
sliding window begins, the last tile of a span, and the draft block after the prefix. They go through the same loop,
whose loads run ahead, and take a branch inside it.

Where tensor descriptors read the keys (`attend_described`), the products of one tile run beside the softmax of the next
one. They read whole tiles, so masked ones are left to the other loop.

In deterministic calls a node of a tree attends along its own path, as plain decoding would (`attend_path`). Its
ancestors lie anywhere in the draft block, where plain decoding finds them one after another after the prefix. A sum's
bits depend on the order of its terms and on the tiles that they are taken in. So from the tile on in which the prefix
ends, tiles of keys are gathered for each node alone: the key that plain decoding would have in a slot comes in that
slot's lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....runtime.language import tl, triton
from .columns import convert_columns, leading_columns, load_columns
from .softmax import add_tile, add_values, multiply_apart, multiply_keys, weigh_tile


class Output(NamedTuple):
    """What the ops of this family return."""

    output: torch.Tensor
    lse: torch.Tensor


class Pool(NamedTuple):
    """The keys and values of one head and request as a program reads them: in pages, or in rows one after another.

    Without a page table a slot is a row: first_page is the request's first row, and the strides are those of a row.
    """

    key_ptr: Any
    value_ptr: Any  # None: values are in the keys, see `batch.Shape.VALUE_DIM`
    page_table_ptr: Any
    first_page: Any
    num_pages: Any
    stride_key: Any  # of a page, in rows of HEAD_DIM
    stride_value: Any  # None: that of the keys, so that places are computed once for both
    first_row: Any  # of the head, from the beginning of a page


class Queries(NamedTuple):
    """A tile of rows: one for each (token, head of the group), heads next to each other."""

    query: Any  # in parts (`columns.py`), of the type that keys and values are widened to
    scale: Any  # [ROW]: of the logits in base 2; includes the scale of the keys
    position: Any  # [ROW] int32; read only with a window
    last_slot: Any  # [ROW]: causal, the last slot that each row sees; None: the mask says, or rows see all
    mask_ptr: Any  # [ROW] pointers to words int64, whose first bit is the slot common_stop; None: no mask
    num_words: Any
    soft_cap: Any


class Span(NamedTuple):
    """The slots to attend to, first..stop - 1, and what a row sees of them.

    It sees all slots before common_stop, and of the others those that its mask or last_slot allows; a window takes away
    the oldest ones.
    """

    first: Any  # a multiple of BLOCK_KEY, unless there is a window
    stop: Any
    common_stop: Any
    window: Any  # how many positions back a row sees; None: all
    last_position: Any  # of the rows that exist
    origin: Any  # position of slot 0
    positions_ptr: Any  # of the slots from common_stop on; None: they follow those before


@triton.jit
def attend(queries, pool, span, state, SHAPE: tl.constexpr):
    """Returns the rows' state (row_max, row_sum, accumulator) after the span.

    Tiles come in the order of their slots and begin at multiples of BLOCK_KEY: the other slots of a tile, and what
    other rows see of them, do not change a row's bits.
    """
    BLOCK_KEY: tl.constexpr = SHAPE.BLOCK_KEY
    # Triton gives the warps of a product other rows if a further product needs its result, and 64 rows are enough for
    # four warps only. So products of two parts are added after the branch, past which it does not look: the other four
    # warps have half of the keys.
    IS_SPLIT: tl.constexpr = SHAPE.VALUE_DIM > 0 and len(queries.query) > 1
    row_max, row_sum, accumulator = state
    begin = span.first // BLOCK_KEY * BLOCK_KEY
    whole_from = span.first  # tiles between these two need no mask
    whole_until = tl.minimum(span.stop, span.common_stop)
    if span.window is not None:
        # not below 0, where the largest window would wrap around
        whole_from = tl.maximum(whole_from, tl.maximum(span.last_position, 0) - span.window + 1 - span.origin)
    page = _load_page(pool, span, begin, SHAPE)
    for start in range(begin, span.stop, BLOCK_KEY):
        is_read = _may_read(pool, span, page, start, SHAPE)
        key_row, value_row = _find_rows(pool, page, start, SHAPE)
        # one tile ahead: otherwise every tile would wait for its pages before it could load its keys
        page = _load_page(pool, span, start + BLOCK_KEY, SHAPE)
        key, value = _load_tile(queries, pool, key_row.to(tl.int64), value_row.to(tl.int64), is_read, SHAPE)
        if IS_SPLIT:
            logits, rest, scale = multiply_apart(queries.query, key, queries.scale)
        else:
            logits, scale = multiply_keys(queries.query, key, queries.scale, queries.soft_cap)
        if (start < whole_from) | (start + BLOCK_KEY > whole_until):
            is_seen = _visible(queries, pool, span, start, SHAPE)
            logits = tl.where(is_seen, logits, float("-inf"))
            if IS_SPLIT:
                rest = tl.where(is_seen, rest, 0.0)
        if IS_SPLIT:
            logits += rest
        row_max, row_sum, accumulator = add_tile(logits, scale, value, row_max, row_sum, accumulator)
    return row_max, row_sum, accumulator


@triton.jit
def attend_described(queries, pool, stop, state, SHAPE: tl.constexpr):
    """Returns the rows' state after slots 0..stop - 1, a multiple of BLOCK_KEY, all of which every row sees.

    pool: with descriptors of tiles [KEY, DIM] in place of pointers; strides are not used, and first_row is a column. A
    tile outside of the pool counts as zeros. A tile's values are added after the logits of the next tile are computed:
    that product is on its way while the softmax takes place.
    """
    BLOCK_KEY: tl.constexpr = SHAPE.BLOCK_KEY
    row_max, row_sum, accumulator = state
    # before the first tile its place is taken by one outside of the pool
    row, decay = tl.full([], -BLOCK_KEY, tl.int32), tl.full(row_max.shape, 1.0, tl.float32)
    weight = tl.zeros([row_max.shape[0], BLOCK_KEY], tl.float32)
    for start in range(0, stop, BLOCK_KEY):
        # found in this tile and not in the one before: a loop that only hands a row on is not pipelined
        next_row = _described_row(pool, start, SHAPE)
        key = (pool.key_ptr.load([next_row, pool.first_row]),)
        logits, scale = multiply_keys(queries.query, key, queries.scale, queries.soft_cap)
        value = (pool.value_ptr.load([row, pool.first_row]),)
        accumulator = add_values(weight, decay, value, accumulator)
        row_max, row_sum, weight, decay = weigh_tile(logits, scale, row_max, row_sum)
        row = next_row
    value = (pool.value_ptr.load([row, pool.first_row]),)
    return row_max, row_sum, add_values(weight, decay, value, accumulator)


@triton.jit
def _described_row(pool, start, SHAPE: tl.constexpr):
    """Returns the row of the pool int32 at which the tile from slot `start` on begins, below 0 for no page."""
    if pool.page_table_ptr is None:
        return (pool.first_page + start).to(tl.int32)
    else:
        page = tl.load(pool.page_table_ptr + pool.first_page + start // SHAPE.PAGE_SIZE).to(tl.int64)
        row = page * SHAPE.PAGE_SIZE + start % SHAPE.PAGE_SIZE
        return tl.where((page >= 0) & (page < pool.num_pages), row, -SHAPE.BLOCK_KEY).to(tl.int32)


@triton.jit
def attend_path(queries, pool, span, state, mask_ptr, num_drafts, SHAPE: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Returns the state (row_max, row_sum, accumulator) of one node's rows after places span.first..span.stop - 1.

    Place p of its path is slot p up to common_stop; then come the drafts that it sees by its words at mask_ptr, in
    ascending order. first is a multiple of BLOCK_KEY; origin: slots before it are not read; positions_ptr: of the
    drafts, for a window; None: they are their places.
    """
    IS_SPLIT: tl.constexpr = SHAPE.VALUE_DIM > 0 and len(queries.query) > 1  # as in `attend`, whose bits these are
    row_max, row_sum, accumulator = state
    lane, node = tl.arange(0, SHAPE.BLOCK_KEY), tl.arange(0, BLOCK_NODE)
    word = tl.load(mask_ptr + node // 64, mask=(node < num_drafts) & (node // 64 < queries.num_words), other=0)
    is_on_path = ((word >> (node % 64)) & 1).to(tl.int32)
    rank = tl.where(is_on_path > 0, tl.cumsum(is_on_path) - 1, -1)
    path_stop = span.common_stop + tl.sum(is_on_path)
    for start in range(span.first, tl.minimum(span.stop, path_stop), SHAPE.BLOCK_KEY):
        place = start + lane
        is_found = rank[None, :] == (place - span.common_stop)[:, None]  # [KEY, NODE]
        draft = tl.sum(tl.where(is_found, node[None, :], 0), axis=1)
        slot = tl.where(place < span.common_stop, place, span.common_stop + draft)
        is_read = (place >= span.origin) & (place < path_stop)
        page = tl.load(pool.page_table_ptr + pool.first_page + slot // SHAPE.PAGE_SIZE, mask=is_read, other=-1)
        is_read &= (page >= 0) & (page < pool.num_pages)
        page, slot_of_page = page.to(tl.int64), slot % SHAPE.PAGE_SIZE
        row = slot_of_page.to(tl.uint32) * SHAPE.STRIDE_TOKEN + pool.first_row
        key_row = page * pool.stride_key + row
        value_row = key_row
        if pool.stride_value is not None:
            value_row = page * pool.stride_value + row
        key, value = _load_tile(queries, pool, key_row, value_row, is_read, SHAPE)
        if IS_SPLIT:
            logits, rest, scale = multiply_apart(queries.query, key, queries.scale)
        else:
            logits, scale = multiply_keys(queries.query, key, queries.scale, queries.soft_cap)
        is_seen = is_read[None, :]
        if span.window is not None:
            position = place
            if span.positions_ptr is not None:
                is_draft = is_read & (place >= span.common_stop)
                given = tl.load(span.positions_ptr + draft, mask=is_draft, other=0).to(tl.int32)
                position = tl.where(is_draft, given, place)
            is_seen &= queries.position[:, None] - position[None, :] < span.window
        logits = tl.where(is_seen, logits, float("-inf"))
        if IS_SPLIT:
            # masked before it is added: Triton would let one product begin with the other, whose bits differ
            logits += tl.where(is_seen, rest, 0.0)
        row_max, row_sum, accumulator = add_tile(logits, scale, value, row_max, row_sum, accumulator)
    return row_max, row_sum, accumulator


@triton.jit
def _load_tile(queries, pool, key_row, value_row, is_read, SHAPE: tl.constexpr):
    """Returns the keys and the values of rows [KEY], in parts and in the queries' type; zeros where is_read is False.

    Where values are the first elements of the keys, both products use what is loaded once.
    """
    key = load_columns(pool.key_ptr, key_row, is_read, SHAPE.HEAD_DIM)
    if SHAPE.VALUE_DIM > 0:
        key = convert_columns(key, queries.query[0].dtype)
        return key, leading_columns(key, SHAPE.VALUE_DIM)
    else:
        value = load_columns(pool.value_ptr, value_row, is_read, SHAPE.HEAD_DIM)
        key = convert_columns(key, queries.query[0].dtype)
        return key, convert_columns(value, queries.query[0].dtype)


@triton.jit
def _load_page(pool, span, start, SHAPE: tl.constexpr):
    """Returns the page id int32 of the tile of slots from `start` on; where tiles may cross pages, one for each slot.

    It is -1 where there is nothing to read.
    """
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    BLOCK_KEY: tl.constexpr = SHAPE.BLOCK_KEY
    if pool.page_table_ptr is None:
        return tl.zeros([], tl.int32)
    else:
        table_ptr = pool.page_table_ptr + pool.first_page
        if PAGE_SIZE >= BLOCK_KEY:
            page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < span.stop, other=-1)
        else:
            lane = tl.arange(0, BLOCK_KEY)
            # unsigned: otherwise compilers keep a pointer for each lane from tile to tile, in too many registers
            index = (start // PAGE_SIZE + lane // PAGE_SIZE).to(tl.uint32)
            page = tl.load(table_ptr + index, mask=_in_span(span, start + lane), other=-1)
        if page.dtype == tl.int64:
            page = tl.where((page >= 0) & (page < pool.num_pages), page, -1)
        return page.to(tl.int32)


@triton.jit
def _in_span(span, slot):
    """Returns whether slots belong to the span."""
    is_in = slot < span.stop
    if span.window is not None:
        is_in &= slot >= span.first
    return is_in


@triton.jit
def _may_read(pool, span, page, start, SHAPE: tl.constexpr):
    """Returns bool [KEY]: slots of the span whose pages lie in the pool; keys and values of others count as 0."""
    slot = start + tl.arange(0, SHAPE.BLOCK_KEY)
    if pool.page_table_ptr is None:
        return _in_span(span, slot)
    else:
        # one comparison: negative ids are large
        is_page = page.to(tl.uint32) < pool.num_pages.to(tl.uint32)
        if SHAPE.PAGE_SIZE >= SHAPE.BLOCK_KEY:
            return _in_span(span, slot) & is_page
        else:
            return is_page


@triton.jit
def _find_rows(pool, page, start, SHAPE: tl.constexpr):
    """Returns where the keys and the values of the tile lie, uint32 [KEY] in rows of HEAD_DIM.

    `check_row_strides` ensures that 32 bits are enough.
    """
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    BLOCK_KEY: tl.constexpr = SHAPE.BLOCK_KEY
    lane = tl.arange(0, BLOCK_KEY)
    if pool.page_table_ptr is None:
        place, row = (pool.first_page + start + lane).to(tl.uint32), pool.first_row
    else:
        place = page.to(tl.uint32)
        # with small pages the same in every tile, so that it is computed once
        slot_of_page = lane % PAGE_SIZE if PAGE_SIZE < BLOCK_KEY else start % PAGE_SIZE + lane
        row = slot_of_page.to(tl.uint32) * SHAPE.STRIDE_TOKEN + pool.first_row
    key_row = place * pool.stride_key + row
    if pool.stride_value is None:
        return key_row, key_row
    else:
        return key_row, place * pool.stride_value + row


@triton.jit
def _visible(queries, pool, span, start, SHAPE: tl.constexpr):
    """Returns bool [ROW, KEY]: which rows see which slots of the tile that begins at `start`."""
    slot = start + tl.arange(0, SHAPE.BLOCK_KEY)
    # read again: most tiles need no mask, and so no page here
    page = _load_page(pool, span, start, SHAPE)
    is_slot = _may_read(pool, span, page, start, SHAPE)
    is_seen = is_slot[None, :]
    if queries.mask_ptr is not None:
        is_seen &= _unpacked(queries, start - span.common_stop, SHAPE.BLOCK_KEY) | (slot < span.common_stop)[None, :]
    elif queries.last_slot is not None:
        is_seen &= slot[None, :] <= queries.last_slot[:, None]
    if span.window is not None:
        position = span.origin + slot
        if span.positions_ptr is not None:
            is_given = (slot >= span.common_stop) & is_slot
            given = tl.load(span.positions_ptr + slot - span.common_stop, mask=is_given, other=0).to(tl.int32)
            position = tl.where(is_given, given, position)
        is_seen &= queries.position[:, None] - position[None, :] < span.window
    return is_seen


@triton.jit
def _unpacked(queries, first_bit, BLOCK_KEY: tl.constexpr):
    """Returns bool [ROW, KEY]: the rows' mask bits from first_bit on, without meaning below 0 and past the words."""
    tl.static_assert(BLOCK_KEY <= 64, "a tile lies within two words")
    index = first_bit >> 6
    shift = (first_bit & 63).to(tl.uint64)
    low = tl.load(queries.mask_ptr + index, mask=(index >= 0) & (index < queries.num_words), other=0)
    high = tl.load(queries.mask_ptr + index + 1, mask=(index >= -1) & (index + 1 < queries.num_words), other=0)
    # in two steps, as a shift by 64 is undefined
    word = (low.to(tl.uint64) >> shift) | (high.to(tl.uint64) << 1 << (63 - shift))
    # shift a lane's bit into the sign of its half, which is known at compile time: two instructions each
    lane = tl.arange(0, BLOCK_KEY)
    half = word.to(tl.int32)[:, None]
    if BLOCK_KEY > 32:
        half = tl.where((lane < 32)[None, :], half, (word >> 32).to(tl.int32)[:, None])
    return (half << (31 - lane % 32)[None, :]) < 0
