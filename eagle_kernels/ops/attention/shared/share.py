"""One share of a request's keys, attended by one tile of rows: what both attention kernels do once they have chosen.

Which share a program attends to is decided in `chunks.py`, by even cuts of the whole batch, or in `ordered.py`, by
positions alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .attention import Pool, Queries, Span, attend, attend_path
from .batch import Batch, request_rows
from .columns import gather_columns, load_columns, scale_columns, spread_columns, store_columns, value_columns
from .paged_cache import request_pages
from .softmax import add_sink, finish_rows, match_keys, start_rows, total_sums


class Inputs(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    query: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    kv_indices: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    tree_mask: Any
    draft_key: Any
    draft_value: Any
    positions: Any
    key_positions: Any


class Sizes(NamedTuple):
    """Numbers of the call; strides count rows of HEAD_DIM."""

    scale: Any
    soft_cap: Any
    window: Any
    num_pages: Any
    num_words: Any
    stride_k_page: Any
    stride_v_page: Any
    stride_query_batch: Any
    stride_query_token: Any
    stride_draft_key_batch: Any
    stride_draft_key_token: Any
    stride_draft_value_batch: Any
    stride_draft_value_token: Any


# of both attention kernels, for do_not_specialize
SIZES = [*Sizes._fields, *Batch._fields[1:]]


class Keys(NamedTuple):
    """The slots begin..stop - 1 of a request, whose rows see none before `first`, all of first..prefix - 1, and drafts
    after those; slots from pool_stop on are read beside the pool, or along the path of one token, which sees some of
    num_seen_drafts drafts."""

    begin: Any
    stop: Any
    first: Any
    prefix: Any
    pool_stop: Any
    num_seen_drafts: Any


class Rows(NamedTuple):
    """A tile of rows (token, head of the group) of one KV head; `first` is the request's first row."""

    first: Any
    token: Any
    head: Any
    is_row: Any
    position: Any


@triton.jit
def attend_share(
    inputs,
    sizes,
    batch,
    request,
    kv_head,
    row,
    row_stop,
    path_token,
    keys,
    SHAPE: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
):
    """Returns (Rows, their state (row_max, row_sum, accumulator)) after the Keys.

    row: the first of the BLOCK_ROW rows of `request`. BLOCK_NODE above 0: those from row_stop on do not count, and the
    slots from pool_stop on are read along the path of the token path_token, if it is at least 0.
    """
    GROUP_SIZE: tl.constexpr = SHAPE.GROUP_SIZE
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    qo_indptr_ptr = batch.lengths.qo_indptr
    first_row, num_tokens = request_rows(qo_indptr_ptr, request, batch.num_query, batch.num_rows, True)
    first_page, _, _ = request_pages(batch, request, True, SHAPE.PAGE_SIZE)
    page_table_ptr = inputs.kv_indices if inputs.block_table is None else inputs.block_table
    k_scale_ptr, v_scale_ptr = inputs.k_scale, inputs.v_scale
    if k_scale_ptr is not None and not SHAPE.ONE_SCALE:
        k_scale_ptr += kv_head
        v_scale_ptr += kv_head
    row += tl.arange(0, BLOCK_ROW)
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = row < row_stop if BLOCK_NODE > 0 else token < num_tokens  # the second form spares registers
    query_row = (first_row + token) * sizes.stride_query_token + head
    if qo_indptr_ptr is None:
        query_row = request * sizes.stride_query_batch + token.to(tl.int64) * sizes.stride_query_token + head
    member = row % GROUP_SIZE // (GROUP_SIZE // SHAPE.JOINED)
    query = load_columns(inputs.query, query_row, is_row, HEAD_DIM // SHAPE.JOINED)
    query = spread_columns(query, member, SHAPE.JOINED)

    mask_ptr, last_draft, last_slot, draft_positions_ptr = None, None, None, None
    # without a draft block the query is in the last slot
    position = keys.prefix - 1 + token * 0
    if SHAPE.DRAFTS != "":
        num_keys = batch.num_drafts
        if qo_indptr_ptr is not None:
            num_keys = num_tokens
        last_draft = token + (num_keys - num_tokens)
        last_slot = keys.prefix + last_draft
        position = last_slot
        if inputs.positions is not None:
            position = tl.load(inputs.positions + first_row + token, mask=is_row, other=0).to(tl.int32)
        if inputs.tree_mask is not None:
            # rows that do not exist have the mask of the first one
            mask_ptr = inputs.tree_mask + (first_row + tl.where(is_row, token, 0)) * sizes.num_words
        key_positions_ptr = inputs.positions if inputs.key_positions is None else inputs.key_positions
        if key_positions_ptr is not None:
            first_key = first_row
            if qo_indptr_ptr is None:
                first_key = request * batch.num_drafts
            draft_positions_ptr = key_positions_ptr + first_key
    last_position = tl.zeros([], tl.int32)
    if sizes.window is not None:
        last_position = tl.max(tl.where(is_row, position, 0))

    matched, logit_scale = match_keys(query, sizes.scale, k_scale_ptr, inputs.k_cache.dtype.element_ty)
    queries = Queries(matched, logit_scale, position, last_slot, mask_ptr, sizes.num_words, sizes.soft_cap)
    pool = Pool(
        inputs.k_cache, inputs.v_cache, page_table_ptr, first_page, sizes.num_pages, sizes.stride_k_page,
        sizes.stride_v_page, first_row=kv_head.to(tl.uint32) * SHAPE.STRIDE_HEAD,
    )  # fmt: skip
    begin, stop, prefix = keys.begin, keys.stop, keys.prefix
    # sums by key where warps share rows: few of them, or those of latents
    IS_SHARED: tl.constexpr = SHAPE.VALUE_DIM > 0 or (BLOCK_ROW <= 16 and SHAPE.BLOCK_KEY >= 64)
    NUM_SUMS: tl.constexpr = SHAPE.BLOCK_KEY if IS_SHARED and SHAPE.SHARE_TILES == 0 else 1
    row_max, row_sum, accumulator = attend(
        queries, pool,
        Span(
            tl.maximum(begin, keys.first), keys.pool_stop, prefix, sizes.window, last_position, 0, draft_positions_ptr
        ),
        start_rows(BLOCK_ROW, value_columns(HEAD_DIM, SHAPE.VALUE_DIM), NUM_SUMS), SHAPE,
    )  # fmt: skip
    if BLOCK_NODE > 0:
        if path_token >= 0:
            row_max, row_sum, accumulator = attend_path(
                queries, pool,
                Span(
                    tl.maximum(begin, keys.pool_stop), stop, prefix, sizes.window, last_position, keys.first,
                    draft_positions_ptr,
                ),
                (row_max, row_sum, accumulator), inputs.tree_mask + (first_row + path_token) * sizes.num_words,
                keys.num_seen_drafts, SHAPE, BLOCK_NODE,
            )  # fmt: skip
    if v_scale_ptr is not None:
        accumulator = scale_columns(accumulator, tl.load(v_scale_ptr))
    if SHAPE.DRAFTS == "beside":
        drafts_begin = tl.cdiv(prefix, SHAPE.BLOCK_KEY) * SHAPE.BLOCK_KEY
        first_key, first_value = first_row * sizes.stride_draft_key_token, first_row * sizes.stride_draft_value_token
        if qo_indptr_ptr is None:
            first_key = request * sizes.stride_draft_key_batch
            first_value = request * sizes.stride_draft_value_batch
        query, logit_scale = match_keys(query, sizes.scale, None, query[0].dtype)
        row_max, row_sum, accumulator = attend(
            Queries(query, logit_scale, position, last_draft, mask_ptr, sizes.num_words, sizes.soft_cap),
            Pool(
                inputs.draft_key + first_key * HEAD_DIM, inputs.draft_value + first_value * HEAD_DIM, None, 0, 0,
                sizes.stride_draft_key_token, sizes.stride_draft_value_token, kv_head,
            ),
            Span(
                tl.maximum(begin - drafts_begin, 0), stop - drafts_begin, prefix * 0, sizes.window, last_position,
                prefix, draft_positions_ptr,
            ),
            (row_max, row_sum, accumulator), SHAPE,
        )  # fmt: skip
    accumulator = gather_columns(accumulator, member, SHAPE.JOINED)
    return Rows(first_row, token, head, is_row, position), (row_max, total_sums(row_sum), accumulator)


@triton.jit
def finish_share(inputs, out, partial, rows, state, is_sink, first_partial_row, is_whole, SHAPE: tl.constexpr):
    """Stores the rows' output and lse: a result if the share is_whole, else a partial one.

    is_sink: the rows to which the logit of their head's sink is added. It is added to a share, not when shares are
    merged, since one more part must not change a row's bits. first_partial_row: the place of the
    request's first token among the partial results.
    """
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP_SIZE
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM if SHAPE.VALUE_DIM > 0 else SHAPE.HEAD_DIM // SHAPE.JOINED
    row_max, row_sum, accumulator = state
    if inputs.sinks is not None:
        sink = tl.load(inputs.sinks + rows.head, mask=is_sink, other=float("-inf")).to(tl.float32)
        row_max, row_sum, accumulator = add_sink(row_max, row_sum, accumulator, sink * 1.4426950408889634)
    output, lse = finish_rows(row_max, row_sum, accumulator)
    if is_whole:
        output_row = (rows.first + rows.token) * NUM_HEADS + rows.head
        tl.store(out.lse + output_row, lse * 0.6931471805599453, mask=rows.is_row)
        store_columns(out.output, output_row, rows.is_row, output, VALUE_DIM)
    else:
        partial_row = (first_partial_row + rows.token) * NUM_HEADS + rows.head
        tl.store(partial.lse + partial_row, lse, mask=rows.is_row)
        store_columns(partial.output, partial_row, rows.is_row, output, VALUE_DIM)
