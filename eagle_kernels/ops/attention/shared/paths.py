"""Lets a node of a tree attend along its own path, as plain decoding would: what `deterministic` calls need.

The ancestors of a node lie anywhere in the draft block, where plain decoding finds them one after another after the
prefix. A sum's bits depend on the order of its terms and on the tiles that they are taken in. So from the tile on in
which the prefix ends, tiles of keys are gathered for each node alone: the key that plain decoding would have in a slot
comes in that slot's lane.
"""

from __future__ import annotations

from ....runtime.language import tl, triton
from .columns import convert_columns, load_columns
from .softmax import add_tile, multiply_keys


@triton.jit
def attend_path(queries, pool, span, state, mask_ptr, num_drafts, SHAPE: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Returns the state (row_max, row_sum, accumulator) of one node's rows after places span.first..span.stop - 1.

    Place p of its path is slot p up to common_stop; then come the drafts that it sees by its words at mask_ptr, in
    ascending order. first is a multiple of BLOCK_KEY; origin: slots before it are not read; positions_ptr: of the
    drafts, for a window; None: they are their places.
    """
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
        page, row = page.to(tl.int64), slot % SHAPE.PAGE_SIZE * SHAPE.NUM_KV_HEADS + pool.kv_head
        key_row = page * pool.stride_key + row
        value_row = key_row
        if pool.stride_value is not None:
            value_row = page * pool.stride_value + row
        key = load_columns(pool.key_ptr, key_row, is_read, SHAPE.HEAD_DIM)
        value = load_columns(pool.value_ptr, value_row, is_read, SHAPE.HEAD_DIM)
        key = convert_columns(key, queries.query[0].dtype)
        value = convert_columns(value, queries.query[0].dtype)
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
        row_max, row_sum, accumulator = add_tile(logits, scale, value, row_max, row_sum, accumulator)
    return row_max, row_sum, accumulator
