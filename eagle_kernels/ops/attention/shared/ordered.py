"""Divides the keys of a request among programs by positions alone (`ordered_shares.py`): bits that no batch changes.

From the tile on in which the prefix ends, each token of a tree has programs of its own, which read the keys along its
path (`paths.py`), so that a node has the bits of plain decoding.
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .attention import request_rows
from .batch import Batch, slot_range
from .merge_shares import launch_merge
from .ordered_shares import (
    count_ordered_shares,
    find_path_share,
    find_share,
    ordered_share,
    ordered_share_of,
    request_shares,
)
from .share import Inputs, Keys, Outputs, Sizes, attend_share, finish_share

# CUDA's limit for all axes of a grid except the first
MAX_PROGRAMS = 65535
# rows, and shares of each, that are merged at once
MERGED_ROWS, MERGED_SHARES = 4, 16
# See `split_attention`. One table for all ops, since each node of a tree must have the bits of plain decoding.
_ROW = {"max_rows": 16, "min_rows": 16, "tile_bytes": 8192, "share_keys": 128, "num_warps": 2, "num_stages": 2}
TUNING = {"default": _ROW, "sm_90": _ROW | {"num_stages": 3}}


@triton.jit(
    do_not_specialize=[
        "batch_size", "table_size", "num_pages", "num_query", "num_rows", "num_drafts", "num_words", "num_shares",
        "window", "reach", "stride_page_table_request", "stride_k_page", "stride_v_page",
        "stride_query_batch", "stride_query_token", "stride_draft_key_batch", "stride_draft_key_token",
        "stride_draft_value_batch", "stride_draft_value_token",
    ]
)  # fmt: skip
def _ordered_attention_kernel(
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
    PATH_SHARES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Attends one tile of rows of one KV head to one share of the keys, or one token to one of its path."""
    await_predecessor(ENABLE_PDL)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_tile = tl.program_id(0) // NUM_KV_HEADS
    share = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    batch = Batch(
        page_indptr_ptr, lengths_ptr, qo_indptr_ptr, stride_page_table_request, table_size, batch_size, num_query,
        num_rows, num_drafts, reach,
    )  # fmt: skip
    inputs = Inputs(
        query_ptr, k_cache_ptr, v_cache_ptr, tree_mask_ptr, draft_key_ptr, draft_value_ptr, positions_ptr,
        key_positions_ptr, page_table_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    )  # fmt: skip
    sizes = Sizes(
        scale, soft_cap, window, num_pages, num_words, stride_k_page, stride_v_page, stride_query_batch,
        stride_query_token, stride_draft_key_batch, stride_draft_key_token, stride_draft_value_batch,
        stride_draft_value_token,
    )  # fmt: skip
    # Where the prefix ends the rows of a tree part: from that tile of keys on, each token has programs of its own.
    HAS_PATHS: tl.constexpr = PATH_SHARES > 0
    TOKEN_TILES: tl.constexpr = (GROUP_SIZE + BLOCK_ROW - 1) // BLOCK_ROW
    SHARES_EACH: tl.constexpr = max(PATH_SHARES, 1)
    is_path = (share >= num_shares) & HAS_PATHS
    if is_path:
        path = (share - num_shares) * (tl.num_programs(0) // NUM_KV_HEADS) + row_tile
        row_tile, path = path % (num_query * TOKEN_TILES), path // (num_query * TOKEN_TILES)
        request = (path // SHARES_EACH).to(tl.int64)
        share, index = find_path_share(
            batch, request, path % SHARES_EACH, SHARE_TILES, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR
        )  # fmt: skip
    else:
        request, index = find_share(batch, share, SHARE_TILES, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
    first_row, num_tokens = request_rows(qo_indptr_ptr, request, num_query, num_rows, request < batch_size)
    has_rows = row_tile * BLOCK_ROW < num_tokens * GROUP_SIZE
    if HAS_PATHS:
        has_rows = tl.where(is_path, row_tile < num_tokens * TOKEN_TILES, has_rows)
    # all but shares that do not exist, for which there is no place, and rows that their request does not have
    if (request < batch_size) & (share < num_shares) & has_rows:
        first, prefix, stop = slot_range(batch, request, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        first_share, num_own_shares = request_shares(batch, request, SHARE_TILES, DRAFTS, BLOCK_KEY, PAGE_SIZE, IS_CSR)
        begin, size = ordered_share(first_share + index, SHARE_TILES)
        size = tl.minimum(size, tl.cdiv(stop, BLOCK_KEY) - begin)  # the last may reach past the largest int32
        begin, num_seen_drafts = begin * BLOCK_KEY, stop - prefix
        stop = tl.minimum(begin + size * BLOCK_KEY, stop)
        row, row_stop, path_token = row_tile * BLOCK_ROW, num_tokens * GROUP_SIZE, -1
        pool_stop = stop
        if DRAFTS == "beside":
            pool_stop = tl.minimum(stop, prefix)
        if HAS_PATHS:
            pool_stop = tl.minimum(stop, prefix // BLOCK_KEY * BLOCK_KEY)
            has_path = stop > pool_stop
            token = row_tile // TOKEN_TILES
            row = tl.where(is_path, token * GROUP_SIZE + row_tile % TOKEN_TILES * BLOCK_ROW, row)
            row_stop = tl.where(is_path, (token + 1) * GROUP_SIZE, row_stop)
            # a share belongs to one kind of programs
            is_own = (is_path == has_path) & (index < num_own_shares)
            path_token = tl.where(has_path & is_own, token, -1)
            row_stop = tl.where(is_own, row_stop, 0)
            pool_stop = tl.where(is_own, pool_stop, begin)
        rows, state = attend_share(
            inputs, sizes, batch, request, kv_head, row=row, row_stop=row_stop, path_token=path_token,
            keys=Keys(begin, stop, first, prefix, pool_stop, num_seen_drafts),
            GROUP_SIZE=GROUP_SIZE, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE, IS_CSR=IS_CSR,
            DRAFTS=DRAFTS, IS_WIDENED=IS_WIDENED, ONE_SCALE=ONE_SCALE, HAS_PATHS=HAS_PATHS, BLOCK_ROW=BLOCK_ROW,
            BLOCK_KEY=BLOCK_KEY, BLOCK_DIM=BLOCK_DIM, BLOCK_NODE=BLOCK_NODE,
        )  # fmt: skip
        is_sink = rows.is_row & (index == 0)
        if window is not None:  # the first that the row sees
            own_share = ordered_share_of(tl.maximum(rows.position - window + 1, 0) // BLOCK_KEY, SHARE_TILES)
            own_share = tl.minimum(tl.maximum(own_share - first_share, 0), num_own_shares - 1)
            is_sink = rows.is_row & (own_share == index)
        finish_share(
            inputs, Outputs(output_ptr, lse_ptr, partial_output_ptr, partial_lse_ptr), rows, state, is_sink,
            share.to(tl.int64) * num_query, num_own_shares == 1, NUM_HEADS=NUM_KV_HEADS * GROUP_SIZE,
            HEAD_DIM=HEAD_DIM,
        )  # fmt: skip


def launch_ordered(op: str, arguments: dict, cache: dict, tuned: dict, *, most_drafts_beside: int) -> None:
    """Launches the attention and, where a request can have several shares, their merge.

    arguments, tuned, most_drafts_beside: as `chunks.launch_chunks` takes them.
    """
    device = arguments["output_ptr"].device
    num_heads, head_dim = arguments["output_ptr"].shape[-2:]
    batch_size, num_query, num_drafts = (arguments[name] for name in ("batch_size", "num_query", "num_drafts"))
    block_row, block_key, group_size = (arguments[name] for name in ("BLOCK_ROW", "BLOCK_KEY", "GROUP_SIZE"))
    row_tiles = triton.cdiv(num_query * group_size, block_row)
    base_tiles = max(1, tuned["share_keys"] // block_key)
    # the most pages decide how many shares there can be; in the CSR form all requests have these together
    most_tiles = triton.cdiv(cache["table_size"] * cache["PAGE_SIZE"], block_key)
    draft_tiles = triton.cdiv(most_drafts_beside, block_key)
    each = count_ordered_shares(most_tiles + draft_tiles, base_tiles)
    num_shares = batch_size * each
    if cache["IS_CSR"]:
        if most_drafts_beside:  # after a tile that the prefix does not fill
            most_tiles += batch_size * (1 + draft_tiles)
        num_shares = min(
            batch_size * count_ordered_shares(most_tiles, base_tiles),
            batch_size + max(1, triton.cdiv(most_tiles, base_tiles)) - 1,
        )
    has_parts = num_shares > batch_size
    path_shares, num_paths = 0, 0
    has_mask = arguments["tree_mask_ptr"] is not None
    if has_mask and arguments["DRAFTS"] != "beside":
        path_tiles = triton.cdiv(block_key - 1 + num_drafts, block_key)  # from that on in which the prefix ends
        path_shares = triton.cdiv(path_tiles - 1, base_tiles) + 1
        num_paths = batch_size * path_shares * num_query * triton.cdiv(group_size, block_row)
    # over two axes, as even as possible; after the shares, the programs of single tokens
    num_layer_shares = num_shares + triton.cdiv(num_paths, max(row_tiles, 1))
    layers = max(1, triton.cdiv(num_layer_shares, MAX_PROGRAMS))
    partial_shape = (num_shares if has_parts else 0, num_query, num_heads)
    partial = {
        "partial_output_ptr": torch.empty((*partial_shape, head_dim), dtype=torch.float32, device=device),
        "partial_lse_ptr": torch.empty(partial_shape, dtype=torch.float32, device=device),
    }
    launch(
        op,
        _ordered_attention_kernel,
        (cache["NUM_KV_HEADS"] * row_tiles, triton.cdiv(num_layer_shares, layers), layers),
        num_shares=num_shares,
        SHARE_TILES=base_tiles,
        PATH_SHARES=path_shares,
        BLOCK_NODE=max(next_power_of_2(num_drafts), 16) if has_mask else 0,
        **arguments,
        **cache,
        **partial,
        **tuning.compiler_options(tuned),
    )
    if has_parts:
        cutting = {"plan_ptr": None, "LEAST_BLOCKS": 0, "BLOCK_BATCH": 0, "SHARE_TILES": base_tiles}
        launch_merge(op, num_shares, MERGED_ROWS, MERGED_SHARES, arguments | cache | partial, cutting)
