"""Attention of prompts: what prefill_attention launches, for keys in pages or in rows.

A program keeps a tile of rows of one request and reads all keys that its rows see. How a grid finds the tiles of
requests of any lengths is said in prefill_attention.py.
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.fp8 import FP8
from ....primitives.paging import slot_strides
from ....runtime import tuning
from ....runtime.language import TensorDescriptor, tl, triton
from ....runtime.launch import bundle, launch
from .attention import Output, Pool, Queries, Span, attend, attend_described
from .batch import Batch, Shape, request_rows
from .columns import load_columns, scale_columns, store_columns, value_columns
from .paged_cache import Lengths, cache_arguments, request_pages
from .share import Inputs
from .softmax import LOG2_E, add_sink, finish_rows, match_keys, start_rows, tile_sizes, tuned_for

BLOCK_BATCH = tl.constexpr(32)  # requests that a program looks at at once


@triton.jit
def _find_tile(batch, number, GROUP_SIZE: tl.constexpr, BLOCK_ROW: tl.constexpr):
    """Returns (request int64, tile of its rows) of a tile among those of all requests; past the last, batch_size."""
    request, before = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    stop = before + 0x7FFFFFFF  # of the request's tiles
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        each = start + tl.arange(0, BLOCK_BATCH)
        is_live = each < batch.batch_size
        _, num_tokens = request_rows(batch.lengths.qo_indptr, each, batch.num_query, batch.num_rows, is_live)
        stops = before + tl.cumsum(tl.cdiv(num_tokens * GROUP_SIZE, BLOCK_ROW))
        request += tl.sum((is_live & (stops <= number)).to(tl.int32))
        stop = tl.minimum(stop, tl.min(tl.where(stops > number, stops, 0x7FFFFFFF)))
        before = tl.max(stops)
    return request, stop - 1 - number


@triton.jit(
    do_not_specialize=[
        "batch_size", "table_size", "num_pages", "num_query", "num_rows", "window",
        "stride_page_table_request", "stride_k_page", "stride_v_page", "stride_query",
    ]
)  # fmt: skip
def _prefill_attention_kernel(
    inputs,
    lengths,
    key_indptr_ptr,
    key_tiles,
    value_tiles,
    out,
    # sizes
    scale,
    soft_cap,
    window,
    batch_size,
    table_size,
    num_pages,
    num_query,
    num_rows,
    stride_page_table_request,
    stride_k_page,
    stride_v_page,
    stride_query,
    SHAPE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    GROUP_SIZE: tl.constexpr = SHAPE.GROUP_SIZE
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    kv_head = tl.program_id(1)
    batch = Batch(lengths, stride_page_table_request, table_size, batch_size, num_query, num_rows, 0, None)
    request, row_tile = _find_tile(batch, tl.program_id(0), GROUP_SIZE, BLOCK_ROW)
    if request < batch_size:
        first_row, num_tokens = request_rows(lengths.qo_indptr, request, num_query, num_rows, True)
        if SHAPE.PAGE_SIZE == 0:  # num_pages: of one key each
            first_page, length = request_rows(key_indptr_ptr, request, num_pages, num_pages, True)
        else:
            first_page, _, length = request_pages(batch, request, True, SHAPE.PAGE_SIZE)
        page_table_ptr = inputs.kv_indices if inputs.block_table is None else inputs.block_table
        k_scale_ptr, v_scale_ptr = inputs.k_scale, inputs.v_scale
        if k_scale_ptr is not None and not SHAPE.ONE_SCALE:
            k_scale_ptr += kv_head
            v_scale_ptr += kv_head

        row = row_tile * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
        token = row // GROUP_SIZE
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        is_row = token < num_tokens
        query_row = (first_row + token) * stride_query + head
        query = load_columns(inputs.query, query_row, is_row, HEAD_DIM)

        # positions of the tile's first and last row decide what is read, and what needs no mask
        last_token = tl.minimum(((row_tile + 1) * BLOCK_ROW - 1) // GROUP_SIZE, num_tokens - 1)
        # queries past max_query are not attended, but their keys exist
        _, num_queries = request_rows(lengths.qo_indptr, request, num_rows, num_rows, True)
        num_before = length - num_queries
        first_position, last_position = num_before + row_tile * BLOCK_ROW // GROUP_SIZE, num_before + last_token
        begin = tl.zeros([], tl.int32)
        common_stop, stop, last_slot = length, length, None
        if IS_CAUSAL:
            common_stop, stop = tl.maximum(first_position + 1, 0), tl.maximum(last_position + 1, 0)
            last_slot = num_before + token
        if window is not None:
            # queries before the first key are at positions below 0, where the largest window would wrap around
            begin = tl.minimum(tl.maximum(tl.maximum(first_position, 0) - window + 1, 0), stop)
        query, logit_scale = match_keys(query, scale, k_scale_ptr, inputs.k_cache.dtype.element_ty)
        head_row = kv_head.to(tl.uint32) * SHAPE.STRIDE_HEAD
        queries = Queries(query, logit_scale, num_before + token, last_slot, None, 0, soft_cap)
        state = start_rows(BLOCK_ROW, value_columns(HEAD_DIM, SHAPE.VALUE_DIM))
        if key_tiles is not None:
            begin = tl.minimum(common_stop, stop) // SHAPE.BLOCK_KEY * SHAPE.BLOCK_KEY
            column = kv_head * (SHAPE.STRIDE_HEAD * HEAD_DIM)
            tiles = Pool(key_tiles, value_tiles, page_table_ptr, first_page, num_pages, 0, 0, column)
            state = attend_described(queries, tiles, begin, state, SHAPE)
        row_max, row_sum, accumulator = attend(
            queries,
            Pool(
                inputs.k_cache, inputs.v_cache, page_table_ptr, first_page, num_pages, stride_k_page, stride_v_page,
                head_row,
            ),
            Span(begin, stop, common_stop, window, last_position, 0, None),
            state,
            SHAPE,
        )  # fmt: skip
        if v_scale_ptr is not None:
            accumulator = scale_columns(accumulator, tl.load(v_scale_ptr))
        if inputs.sinks is not None:
            sink = tl.load(inputs.sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
            row_max, row_sum, accumulator = add_sink(row_max, row_sum, accumulator, sink)
        output, lse = finish_rows(row_max, row_sum, accumulator)
        output_row = (first_row + token) * (SHAPE.NUM_KV_HEADS * GROUP_SIZE) + head
        tl.store(out.lse + output_row, lse * 0.6931471805599453, mask=is_row)
        store_columns(out.output, output_row, is_row, output, HEAD_DIM if SHAPE.VALUE_DIM == 0 else SHAPE.VALUE_DIM)


def launch_prompts(op: str, values: dict, out: Output, *, keys: tuple, tuned: dict, is_described: bool = False) -> None:
    """Launches the attention that an op's checked arguments describe, into `out`.

    values: the op's arguments, None where it has none. keys: keys and values, in pages [pages, page_size, Hkv, D] where
    there is a page table, else in rows [T, Hkv, D]; no values where they are the first elements of the keys. tuned: the
    op's tuning row. is_described: tensor descriptors read the tiles of keys.
    """
    query, qo_indptr, max_query, window = (values[name] for name in ("query", "qo_indptr", "max_query", "window"))
    sm_scale, soft_cap, k_scale = (values[name] for name in ("sm_scale", "soft_cap", "k_scale"))
    table = values["kv_indices"] if values["block_table"] is None else values["block_table"]
    key, value = keys
    is_paged, (num_heads, head_dim), batch_size = table is not None, query.shape[1:], len(qo_indptr) - 1
    page_size, num_kv_heads = key.shape[1] if is_paged else 0, key.shape[-2]
    strides = slot_strides(key) if is_paged else (num_kv_heads, 1)
    group_size = num_heads // num_kv_heads
    num_rows = max_query * group_size
    tuned = tuned_for(tuned, head_dim, key.dtype in FP8)
    block_row, block_key = tile_sizes(num_rows, head_dim, query.element_size(), tuned)
    tiles = [_tiles(each, page_size, block_key) for each in keys] if is_described else (None, None)
    most_tiles = batch_size * triton.cdiv(num_rows, block_row)
    num_tiles = min(most_tiles, len(query) * group_size // block_row + batch_size)
    launch(
        op,
        _prefill_attention_kernel,
        (num_tiles, num_kv_heads),
        inputs=bundle(Inputs, values)._replace(k_cache=key, v_cache=value),
        lengths=bundle(Lengths, values),
        key_indptr_ptr=qo_indptr if values.get("key_indptr") is None else values["key_indptr"],
        key_tiles=tiles[0],
        value_tiles=tiles[1],
        out=out,
        scale=(head_dim**-0.5 if sm_scale is None else sm_scale) * LOG2_E,
        soft_cap=None if soft_cap is None else float(soft_cap),
        window=window,
        batch_size=batch_size,
        num_query=max_query,
        num_rows=len(query),
        **cache_arguments(key, key if value is None else value, table),
        stride_query=query.stride(0) // head_dim,
        SHAPE=Shape(
            group_size, num_kv_heads, head_dim, page_size, *strides, k_scale is None or len(k_scale) == 1, block_key,
            VALUE_DIM=out.output.shape[-1] if value is None else 0,
        ),
        IS_CAUSAL=values["is_causal"],
        BLOCK_ROW=block_row,
        **tuning.compiler_options(tuned),
    )  # fmt: skip


def _tiles(keys: torch.Tensor, page_size: int, block_key: int) -> TensorDescriptor:
    """Returns a descriptor of all slots' rows, in tiles [block_key, D]."""
    num_rows, (num_heads, head_dim) = len(keys) * max(page_size, 1), keys.shape[-2:]
    width = (num_heads - 1) * (keys.stride(-2) if num_heads > 1 else 0) + head_dim
    return TensorDescriptor(keys, [num_rows, width], [keys.stride(-3), 1], [block_key, head_dim])
