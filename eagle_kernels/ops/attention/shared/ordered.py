"""Divides the keys of a request among programs by positions alone (`ordered_shares.py`): bits that no batch changes.

From the tile on in which the prefix ends, each token of a tree has programs of its own, which read the keys along its
path (`attend_path`), so that a node has the bits of plain decoding.
"""

from __future__ import annotations

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .batch import Batch, request_rows, slot_range
from .merge_shares import allocate_partial, launch_merge
from .ordered_shares import (
    count_ordered_shares,
    find_path_share,
    find_share,
    ordered_share,
    ordered_share_of,
    request_shares,
)
from .share import SIZES, Keys, Sizes, attend_share, finish_share

# CUDA's limit for all axes of a grid except the first
MAX_PROGRAMS = 65535
# rows, and shares of each, that are merged at once
MERGED_ROWS, MERGED_SHARES = 4, 16
# See `split_attention`. One table for all ops, since each node of a tree must have the bits of plain decoding.
_ROW = {"max_rows": 16, "min_rows": 16, "tile_bytes": 8192, "share_keys": 128, "num_warps": 2, "num_stages": 2,
        "widest": {"num_warps": 4}}  # fmt: skip
TUNING = {
    "default": _ROW,
    "gfx942": _ROW | {"widest": {"num_warps": 4, "num_stages": 1}},
    "sm_90": _ROW | {"num_stages": 3},
}


@triton.jit(do_not_specialize=[*SIZES, "num_shares"])
def _ordered_attention_kernel(
    inputs,
    lengths,
    # outputs
    out,
    partial,
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
    SHAPE: tl.constexpr,
    PATH_SHARES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Attends one tile of rows of one KV head to one share of the keys, or one token to one of its path."""
    await_predecessor(ENABLE_PDL)
    GROUP_SIZE: tl.constexpr = SHAPE.GROUP_SIZE
    BLOCK_KEY: tl.constexpr = SHAPE.BLOCK_KEY
    SHARE_TILES: tl.constexpr = SHAPE.SHARE_TILES
    kv_head = tl.program_id(0) % SHAPE.NUM_KV_HEADS
    row_tile = tl.program_id(0) // SHAPE.NUM_KV_HEADS
    share = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    batch = Batch(lengths, stride_page_table_request, table_size, batch_size, num_query, num_rows, num_drafts, reach)
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
        path = (share - num_shares) * (tl.num_programs(0) // SHAPE.NUM_KV_HEADS) + row_tile
        row_tile, path = path % (num_query * TOKEN_TILES), path // (num_query * TOKEN_TILES)
        request = (path // SHARES_EACH).to(tl.int64)
        share, index = find_path_share(batch, request, path % SHARES_EACH, SHAPE)
    else:
        request, index = find_share(batch, share, SHAPE)
    first_row, num_tokens = request_rows(lengths.qo_indptr, request, num_query, num_rows, request < batch_size)
    has_rows = row_tile * BLOCK_ROW < num_tokens * GROUP_SIZE
    if HAS_PATHS:
        has_rows = tl.where(is_path, row_tile < num_tokens * TOKEN_TILES, has_rows)
    # all but shares that do not exist, for which there is no place, and rows that their request does not have
    if (request < batch_size) & (share < num_shares) & has_rows:
        first, prefix, stop = slot_range(batch, request, SHAPE)
        first_share, num_own_shares = request_shares(batch, request, SHAPE)
        begin, size = ordered_share(first_share + index, SHARE_TILES)
        size = tl.minimum(size, tl.cdiv(stop, BLOCK_KEY) - begin)  # the last may reach past the largest int32
        begin, num_seen_drafts = begin * BLOCK_KEY, stop - prefix
        stop = tl.minimum(begin + size * BLOCK_KEY, stop)
        row, row_stop, path_token = row_tile * BLOCK_ROW, num_tokens * GROUP_SIZE, -1
        pool_stop = stop
        if SHAPE.DRAFTS == "beside":
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
            SHAPE=SHAPE, BLOCK_ROW=BLOCK_ROW, BLOCK_NODE=BLOCK_NODE,
        )  # fmt: skip
        is_sink = rows.is_row & (index == 0)
        if window is not None:  # the first that the row sees
            own_share = ordered_share_of(tl.maximum(rows.position - window + 1, 0) // BLOCK_KEY, SHARE_TILES)
            own_share = tl.minimum(tl.maximum(own_share - first_share, 0), num_own_shares - 1)
            is_sink = rows.is_row & (own_share == index)
        finish_share(
            inputs, out, partial, rows, state, is_sink, share.to(tl.int64) * num_query, num_own_shares == 1, SHAPE=SHAPE
        )


def launch_ordered(op: str, arguments: dict, tuned: dict) -> None:
    """Launches the attention and, where a request can have several shares, their merge.

    arguments, tuned: as `chunks.launch_chunks` takes them.
    """
    lengths, shape = arguments["lengths"]._replace(plan=None), arguments["SHAPE"]
    batch_size, num_query, num_drafts = (arguments[name] for name in ("batch_size", "num_query", "num_drafts"))
    block_row, block_key, base_tiles = arguments["BLOCK_ROW"], shape.BLOCK_KEY, shape.SHARE_TILES
    row_tiles = triton.cdiv(num_query * shape.GROUP_SIZE, block_row)
    # the most pages decide how many shares there can be; in the CSR form all requests together have these
    most_tiles = triton.cdiv(arguments["table_size"] * shape.PAGE_SIZE, block_key)
    draft_tiles = triton.cdiv(num_drafts, block_key) if shape.DRAFTS == "beside" else 0
    each = count_ordered_shares(most_tiles + draft_tiles, base_tiles)
    num_shares = batch_size * each
    if lengths.kv_indptr is not None:
        if draft_tiles:  # after a tile that the prefix does not fill
            most_tiles += batch_size * (1 + draft_tiles)
        num_shares = min(
            batch_size * count_ordered_shares(most_tiles, base_tiles),
            batch_size + max(1, triton.cdiv(most_tiles, base_tiles)) - 1,
        )
    has_parts = num_shares > batch_size
    path_shares, num_paths = 0, 0
    if arguments["inputs"].tree_mask is not None and shape.DRAFTS != "beside":
        path_tiles = triton.cdiv(block_key - 1 + num_drafts, block_key)  # from that on in which the prefix ends
        path_shares = triton.cdiv(path_tiles - 1, base_tiles) + 1
        num_paths = batch_size * path_shares * num_query * triton.cdiv(shape.GROUP_SIZE, block_row)
    # over two axes, as even as possible; after the shares, the programs of single tokens
    num_layer_shares = num_shares + triton.cdiv(num_paths, max(row_tiles, 1))
    layers = max(1, triton.cdiv(num_layer_shares, MAX_PROGRAMS))
    arguments |= {"lengths": lengths, "partial": allocate_partial(arguments, num_shares if has_parts else 0)}
    launch(
        op,
        _ordered_attention_kernel,
        (shape.NUM_KV_HEADS * row_tiles, triton.cdiv(num_layer_shares, layers), layers),
        num_shares=num_shares,
        PATH_SHARES=path_shares,
        BLOCK_NODE=max(next_power_of_2(num_drafts), 16) if path_shares else 0,
        **arguments,
        **tuning.compiler_options(tuned),
    )
    if has_parts:
        launch_merge(op, num_shares, MERGED_ROWS, MERGED_SHARES, arguments, LEAST_BLOCKS=0, BLOCK_BATCH=0)
