"""Attention whose keys are split over programs: what gqa_decode launches, and tree_attention with its draft block.

One kernel attends, tile of rows by tile of rows, to one share of a request's keys (`shares.py`). A second one merges
the rows of requests that have more than one share (`merge_shares.py`).
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.fp8 import FP8
from ....runtime import tuning
from ....runtime.language import is_interpreting, next_power_of_2, tl, triton
from ....runtime.launch import launch
from .attention import Pool, Queries, Span, attend, request_rows
from .merge_shares import launch_merge
from .paged_cache import cache_arguments, request_pages
from .paths import attend_path
from .shares import (
    Batch,
    count_shares,
    cut,
    find_path_share,
    find_share,
    ordered_share,
    ordered_share_of,
    share_tiles,
    slot_range,
)
from .softmax import LOG2_E, add_sink, finish_rows, match_keys, start_rows, tile_sizes

# CUDA's limit for all axes of a grid except the first
MAX_PROGRAMS = 65535
# A row of an op's TUNING has the compiler's options, and
#     for tiles       at most max_rows and at least min_rows rows, and tile_bytes of keys
#     for shares      at least share_keys keys, and about as many shares as give `programs` programs
#     for the merge   merged_rows rows and merged_parts parts at once
#     float8          what differs with keys of 8 bits
#
# Where bits must not depend on the batch, sums are taken in the order of positions that this table gives: one table for
# all ops, since each node of a tree must have the bits of plain decoding along its path.
_ORDERED = {"max_rows": 16, "min_rows": 16, "tile_bytes": 8192, "share_keys": 128, "programs": 264,
            "merged_rows": 4, "merged_parts": 4, "num_warps": 2, "num_stages": 2}  # fmt: skip
ORDERED_TUNING = {"default": _ORDERED, "sm_90": _ORDERED | {"num_stages": 3}}


@triton.jit(
    do_not_specialize=[
        "batch_size", "table_size", "num_pages", "num_query", "num_rows", "num_drafts", "num_words", "wanted_shares",
        "num_shares", "window", "reach", "stride_page_table_request", "stride_k_page", "stride_v_page",
        "stride_query_batch", "stride_query_token", "stride_draft_key_batch", "stride_draft_key_token",
        "stride_draft_value_batch", "stride_draft_value_token",
    ]
)  # fmt: skip
def _attention_kernel(
    # inputs
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tree_mask_ptr,
    draft_key_ptr,
    draft_value_ptr,
    qo_indptr_ptr,
    positions_ptr,
    key_positions_ptr,
    page_table_ptr,
    page_indptr_ptr,
    lengths_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    # outputs
    output_ptr,
    lse_ptr,
    shares_ptr,
    partial_output_ptr,
    partial_lse_ptr,
    # sizes
    scale,
    soft_cap,
    window,
    reach,
    batch_size,
    table_size,
    num_pages,
    num_query,
    num_rows,
    num_drafts,
    num_words,
    wanted_shares,
    num_shares,
    stride_page_table_request,
    stride_k_page,
    stride_v_page,
    stride_query_batch,
    stride_query_token,
    stride_draft_key_batch,
    stride_draft_key_token,
    stride_draft_value_batch,
    stride_draft_value_token,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    DRAFTS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SHARE_TILES: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    PATH_SHARES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Attends one tile of rows of one KV head to one share of the keys."""
    await_predecessor(ENABLE_PDL)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_tile = tl.program_id(0) // NUM_KV_HEADS
    share = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    batch = Batch(
        page_indptr_ptr, lengths_ptr, qo_indptr_ptr, stride_page_table_request, table_size, batch_size, num_query,
        num_rows, num_drafts, reach,
    )  # fmt: skip
    size = SHARE_TILES
    if not IS_ORDERED:
        size = share_tiles(batch, wanted_shares, SHARE_TILES, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    # Where the prefix ends the rows of a tree part: from that tile of keys on, each token has programs of its own.
    HAS_PATHS: tl.constexpr = PATH_SHARES > 0
    TOKEN_TILES: tl.constexpr = (GROUP_SIZE + BLOCK_ROW - 1) // BLOCK_ROW
    SHARES_EACH: tl.constexpr = max(PATH_SHARES, 1)
    is_path = (share >= num_shares) & HAS_PATHS
    if is_path:
        path = (share - num_shares) * (tl.num_programs(0) // NUM_KV_HEADS) + row_tile
        row_tile, path = path % (num_query * TOKEN_TILES), path // (num_query * TOKEN_TILES)
        request = (path // SHARES_EACH).to(tl.int64)
        share, index = find_path_share(batch, request, path % SHARES_EACH, size, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    else:
        request, index = find_share(batch, share, size, IS_ORDERED, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    first_row, num_tokens = request_rows(qo_indptr_ptr, request, num_query, num_rows, request < batch_size)
    has_rows = row_tile * BLOCK_ROW < num_tokens * GROUP_SIZE
    if HAS_PATHS:
        has_rows = tl.where(is_path, row_tile < num_tokens * TOKEN_TILES, has_rows)
    # all but shares that do not exist, for which there is no place, and rows that their request does not have
    if (request < batch_size) & (share < num_shares) & has_rows:
        first, prefix, stop = slot_range(batch, request, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        size, num_own_shares = cut(batch, request, size, IS_ORDERED, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        first_share, begin = 0, first // BLOCK_KEY + index * size
        if IS_ORDERED:
            first_share = size
            begin, size = ordered_share(first_share + index, SHARE_TILES)
            size = tl.minimum(size, tl.cdiv(stop, BLOCK_KEY) - begin)  # the last may reach past the largest int32
        if (index == 0) & (tl.program_id(0) == 0):
            tl.store(shares_ptr + request * 3, share)
            tl.store(shares_ptr + request * 3 + 1, num_own_shares)
            tl.store(shares_ptr + request * 3 + 2, first_share)
        begin, num_seen_drafts = begin * BLOCK_KEY, stop - prefix
        stop = tl.minimum(begin + size * BLOCK_KEY, stop)
        first_page, _, _ = request_pages(batch, request, True, PAGE_SIZE, IS_CSR)
        if k_scale_ptr is not None and not ONE_SCALE:
            k_scale_ptr += kv_head
            v_scale_ptr += kv_head

        row, row_stop = row_tile * BLOCK_ROW, num_tokens * GROUP_SIZE
        pool_stop = stop
        if DRAFTS == "beside":
            pool_stop = tl.minimum(stop, prefix)
        if HAS_PATHS:
            pool_stop = tl.minimum(stop, prefix // BLOCK_KEY * BLOCK_KEY)
            has_path = stop > pool_stop
            path_token = row_tile // TOKEN_TILES
            row = tl.where(is_path, path_token * GROUP_SIZE + row_tile % TOKEN_TILES * BLOCK_ROW, row)
            row_stop = tl.where(is_path, (path_token + 1) * GROUP_SIZE, row_stop)
            # a share belongs to one kind of programs
            is_own = (is_path == has_path) & (index < num_own_shares)
            has_path &= is_own
            row_stop = tl.where(is_own, row_stop, 0)
            pool_stop = tl.where(is_own, pool_stop, begin)
        row += tl.arange(0, BLOCK_ROW)
        token = row // GROUP_SIZE
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        is_row = row < row_stop if HAS_PATHS else token < num_tokens  # the second form spares registers
        column = tl.arange(0, BLOCK_DIM)
        in_bounds = is_row[:, None] & (column < HEAD_DIM)[None, :]
        query_row = (first_row + token) * stride_query_token + head
        if qo_indptr_ptr is None:
            query_row = request * stride_query_batch + token.to(tl.int64) * stride_query_token + head
        query = tl.load(query_ptr + query_row[:, None] * HEAD_DIM + column[None, :], mask=in_bounds, other=0.0)

        mask_ptr, last_draft, last_slot, positions_of_drafts_ptr = None, None, None, None
        # without a draft block the query is in the last slot
        position = prefix - 1 + token * 0
        if DRAFTS != "":
            num_keys = num_drafts
            if qo_indptr_ptr is not None:
                num_keys = num_tokens
            last_draft = token + (num_keys - num_tokens)
            last_slot = prefix + last_draft
            position = last_slot
            if positions_ptr is not None:
                position = tl.load(positions_ptr + first_row + token, mask=is_row, other=0).to(tl.int32)
            if tree_mask_ptr is not None:
                # rows that do not exist have the mask of the first one
                mask_ptr = tree_mask_ptr + (first_row + tl.where(is_row, token, 0)) * num_words
            if key_positions_ptr is not None:
                first_key = first_row
                if qo_indptr_ptr is None:
                    first_key = request * num_drafts
                positions_of_drafts_ptr = key_positions_ptr + first_key
        last_position = tl.zeros([], tl.int32)
        if window is not None:
            last_position = tl.max(tl.where(is_row, position, 0))

        matched, logit_scale = match_keys(query, scale, k_scale_ptr, k_cache_ptr.dtype.element_ty)
        queries = Queries(matched, logit_scale, position, last_slot, mask_ptr, num_words, soft_cap)
        pool = Pool(
            k_cache_ptr, v_cache_ptr, page_table_ptr, first_page, num_pages, stride_k_page, stride_v_page, kv_head,
        )  # fmt: skip
        row_max, row_sum, accumulator = attend(
            queries,
            pool,
            Span(tl.maximum(begin, first), pool_stop, prefix, window, last_position, 0, positions_of_drafts_ptr),
            start_rows(BLOCK_ROW, BLOCK_DIM),
            IS_WIDENED=IS_WIDENED, PAGE_SIZE=PAGE_SIZE, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM,
                BLOCK_KEY=BLOCK_KEY, BLOCK_DIM=BLOCK_DIM,
        )  # fmt: skip
        if HAS_PATHS:
            if has_path:
                row_max, row_sum, accumulator = attend_path(
                    queries,
                    pool,
                    Span(
                        tl.maximum(begin, pool_stop), stop, prefix, window, last_position, first,
                        positions_of_drafts_ptr,
                    ),
                    (row_max, row_sum, accumulator),
                    tree_mask_ptr + (first_row + path_token) * num_words,
                    num_seen_drafts,
                    IS_WIDENED=IS_WIDENED, PAGE_SIZE=PAGE_SIZE, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM,
                    BLOCK_KEY=BLOCK_KEY, BLOCK_DIM=BLOCK_DIM, BLOCK_NODE=BLOCK_NODE,
                )  # fmt: skip
        if v_scale_ptr is not None:
            accumulator *= tl.load(v_scale_ptr)
        if DRAFTS == "beside":
            drafts_begin = tl.cdiv(prefix, BLOCK_KEY) * BLOCK_KEY
            first_key, first_value = first_row * stride_draft_key_token, first_row * stride_draft_value_token
            if qo_indptr_ptr is None:
                first_key, first_value = request * stride_draft_key_batch, request * stride_draft_value_batch
            query, logit_scale = match_keys(query, scale, None, query.dtype)
            row_max, row_sum, accumulator = attend(
                Queries(query, logit_scale, position, last_draft, mask_ptr, num_words, soft_cap),
                Pool(
                    draft_key_ptr + first_key * HEAD_DIM, draft_value_ptr + first_value * HEAD_DIM, None, 0, 0,
                    stride_draft_key_token, stride_draft_value_token, kv_head,
                ),
                Span(
                    tl.maximum(begin - drafts_begin, 0), stop - drafts_begin, prefix * 0, window, last_position, prefix,
                    positions_of_drafts_ptr,
                ),
                (row_max, row_sum, accumulator),
                IS_WIDENED=IS_WIDENED, PAGE_SIZE=0, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM,
                BLOCK_KEY=BLOCK_KEY, BLOCK_DIM=BLOCK_DIM,
            )  # fmt: skip

        if sinks_ptr is not None:
            # added to the first share, not when shares are merged: one more share must not change a row's bits
            is_sink = is_row & (index == 0)
            if IS_ORDERED and window is not None:  # the first that the row sees
                own_share = ordered_share_of(tl.maximum(position - window + 1, 0) // BLOCK_KEY, SHARE_TILES)
                own_share = tl.minimum(tl.maximum(own_share - first_share, 0), num_own_shares - 1)
                is_sink = is_row & (own_share == index)
            sink = tl.load(sinks_ptr + head, mask=is_sink, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            row_max, row_sum, accumulator = add_sink(row_max, row_sum, accumulator, sink)
        output, lse = finish_rows(row_max, row_sum, accumulator)
        if num_own_shares == 1:
            output_row = (first_row + token) * (NUM_KV_HEADS * GROUP_SIZE) + head
            tl.store(lse_ptr + output_row, lse * 0.6931471805599453, mask=is_row)
            tl.store(
                output_ptr + output_row[:, None] * HEAD_DIM + column[None, :],
                output.to(output_ptr.dtype.element_ty), mask=in_bounds,
            )  # fmt: skip
        else:
            partial_row = (share.to(tl.int64) * num_query + token) * (NUM_KV_HEADS * GROUP_SIZE) + head
            tl.store(partial_lse_ptr + partial_row, lse, mask=is_row)
            tl.store(partial_output_ptr + partial_row[:, None] * HEAD_DIM + column[None, :], output, mask=in_bounds)


def launch_attention(
    op: str,
    values: dict,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    tuned: dict,
    num_query: int,
    num_drafts: int,
    drafts: str,
) -> None:
    """Launches the attention that an op's checked arguments describe, into `out`, (output, lse).

    values: the op's arguments, None where it has none. tuned: the op's tuning row, see `ORDERED_TUNING`.
    num_query: tokens of a request, at most. num_drafts: draft keys of a request, if ragged at most. drafts: where they
    are, see `shares.slot_range`.
    """
    query, draft_key, draft_value = values["query"], values.get("draft_key"), values.get("draft_value")
    qo_indptr, positions, tree_mask = values.get("qo_indptr"), values.get("positions"), values.get("tree_mask")
    key_positions = values.get("key_positions")
    window, k_scale = values["window"], values["k_scale"]
    device, num_heads, head_dim = query.device, *query.shape[-2:]
    cache = cache_arguments(values)
    batch_size, group_size = len(cache["lengths_ptr"]), num_heads // cache["NUM_KV_HEADS"]
    is_ordered = values["deterministic"]
    if is_ordered:
        tuned = tuning.row(ORDERED_TUNING, device)
    elif values["k_cache"].dtype in FP8:
        tuned = tuned | tuned.get("float8", {})
    tiles = tile_sizes(num_query * group_size, head_dim, query.element_size(), tuned)
    block_key = tiles["BLOCK_KEY"]
    row_tiles = triton.cdiv(num_query * group_size, tiles["BLOCK_ROW"])
    num_tiles = cache["NUM_KV_HEADS"] * row_tiles
    wanted_shares = max(1, tuned["programs"] // max(num_tiles, 1))
    share_tiles_least = max(1, tuned["share_keys"] // block_key)
    num_shares = count_shares(
        cache, batch_size, drafts, num_drafts, block_key, share_tiles_least, wanted_shares, is_ordered
    )
    has_parts = num_shares > batch_size
    path_shares, num_paths = 0, 0
    if is_ordered and tree_mask is not None and drafts != "beside":
        path_tiles = triton.cdiv(block_key - 1 + num_drafts, block_key)  # from that on in which the prefix ends
        path_shares = triton.cdiv(path_tiles - 1, share_tiles_least) + 1
        num_paths = batch_size * path_shares * num_query * triton.cdiv(group_size, tiles["BLOCK_ROW"])
    # over two axes, as even as possible; after the shares, the programs of single tokens
    num_layer_shares = num_shares + triton.cdiv(num_paths, max(row_tiles, 1))
    layers = max(1, triton.cdiv(num_layer_shares, MAX_PROGRAMS))
    layer_shares = triton.cdiv(num_layer_shares, layers)
    partial_shape = (num_shares if has_parts else 0, num_query, num_heads)
    shared = {
        # of each request: the number of its first share, how many it has, and of which tiles the first is
        "shares_ptr": torch.empty((batch_size, 3), dtype=torch.int32, device=device),
        "partial_output_ptr": torch.empty((*partial_shape, head_dim), dtype=torch.float32, device=device),
        "partial_lse_ptr": torch.empty(partial_shape, dtype=torch.float32, device=device),
        "output_ptr": out[0],
        "lse_ptr": out[1],
        "qo_indptr_ptr": qo_indptr,
        "num_query": num_query,
        "num_rows": out[1].numel() // max(num_heads, 1),
        "BLOCK_DIM": tiles["BLOCK_DIM"],
    }

    def stride(tensor, axis):
        """Returns the stride of an axis before the last two, in rows of HEAD_DIM."""
        return 0 if tensor is None or tensor.dim() < axis + 3 else tensor.stride(axis) // head_dim

    token_axis = 0 if query.dim() == 3 else 1
    launch(
        op,
        _attention_kernel,
        (num_tiles, layer_shares, layers),
        query_ptr=query,
        tree_mask_ptr=tree_mask,
        draft_key_ptr=draft_key,
        draft_value_ptr=draft_value,
        positions_ptr=positions,
        key_positions_ptr=positions if key_positions is None else key_positions,
        k_scale_ptr=k_scale,
        v_scale_ptr=values["v_scale"],
        sinks_ptr=values["sinks"],
        scale=(head_dim**-0.5 if values["sm_scale"] is None else values["sm_scale"]) * LOG2_E,
        soft_cap=None if values["soft_cap"] is None else float(values["soft_cap"]),
        window=window,
        num_words=0 if tree_mask is None else tree_mask.shape[-1],
        stride_query_batch=query.stride(0) // head_dim,
        stride_query_token=query.stride(token_axis) // head_dim,
        stride_draft_key_batch=stride(draft_key, 0),
        stride_draft_key_token=stride(draft_key, token_axis),
        stride_draft_value_batch=stride(draft_value, 0),
        stride_draft_value_token=stride(draft_value, token_axis),
        reach=None if window is None else window - (drafts != ""),
        batch_size=batch_size,
        num_drafts=num_drafts,
        wanted_shares=wanted_shares,
        num_shares=num_shares,
        GROUP_SIZE=group_size,
        DRAFTS=drafts,
        IS_WIDENED=is_interpreting() and query.dtype == torch.bfloat16,
        ONE_SCALE=k_scale is None or len(k_scale) == 1,
        SHARE_TILES=share_tiles_least,
        IS_ORDERED=bool(is_ordered),
        PATH_SHARES=path_shares,
        BLOCK_ROW=tiles["BLOCK_ROW"],
        BLOCK_KEY=block_key,
        BLOCK_NODE=max(next_power_of_2(num_drafts), 16) if is_ordered and tree_mask is not None else 0,
        **cache,
        **shared,
        **tuning.compiler_options(tuned),
    )
    if has_parts:
        launch_merge(op, num_shares, tuned, **shared)
