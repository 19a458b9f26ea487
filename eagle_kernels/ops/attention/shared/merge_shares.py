"""Merges the partial results of requests whose keys were cut into several shares.

The rows of all such requests are divided evenly among programs, so that one long request among short ones is merged by
as many programs as any other batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import target, tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .attention import Output
from .batch import Batch, request_rows
from .columns import first_columns
from .cuts import find_cut, request_chunks
from .ordered_shares import request_shares
from .softmax import finish_rows, merge_rows, start_rows

# columns of a head that a program merges: more, of all rows and parts at once, would not fit into registers
COLUMNS = 128
# of what the kernel of the shares takes
MERGE_TAKES = (
    "lengths", "partial", "out", "table_size", "batch_size", "num_query", "num_rows", "num_drafts", "reach", "SHAPE",
)  # fmt: skip
# rows that are merged at once of a request with so few parts, unless shares are ordered: how those are merged must not
# depend on how many there are
FEW_PARTS_ROWS, FEW_PARTS = tl.constexpr(4), tl.constexpr(4)
# programs: of a multiprocessor
MERGE_TUNING = {"default": {"programs": 8, "num_warps": 4}}


class Found(NamedTuple):
    """The request that a tile of rows (token, head) belongs to; a request of one part has no tiles."""

    request: Any  # int64
    first_tile: Any
    num_tiles: Any
    before: Any  # place of part 0, or the chunk that it ends
    begin: Any  # negative where the first part that there is is not part 0
    num_parts: Any
    total: Any  # tiles of all requests


@triton.jit
def _merge_tile(
    partial, out, batch, found, tile,
    SHAPE: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_MERGED: tl.constexpr, BLOCK_PART: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a tile of one request's rows, some columns of their heads."""
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP_SIZE
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM if SHAPE.VALUE_DIM > 0 else SHAPE.HEAD_DIM // SHAPE.JOINED
    first_row, num_tokens = request_rows(batch.lengths.qo_indptr, found.request, batch.num_query, batch.num_rows, True)
    row = (tile - found.first_tile) * BLOCK_MERGED + tl.arange(0, BLOCK_MERGED)
    column = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    is_column, is_row = column < VALUE_DIM, row < num_tokens * NUM_HEADS
    row_max, row_sum, accumulator = start_rows(BLOCK_MERGED, BLOCK_DIM)
    for start in range(found.begin, found.num_parts, BLOCK_PART):
        part = start + tl.arange(0, BLOCK_PART)
        is_part = is_row[:, None] & ((part >= 0) & (part < found.num_parts))[None, :]
        place = found.before + part
        if SHAPE.SHARE_TILES == 0:  # see `chunks.py`: the last part of a chunk, and then the first ones
            place = 2 * place + (part == 0).to(tl.int32)
        place = place.to(tl.int64)[None, :] * batch.num_query * NUM_HEADS + row[:, None]
        lse = tl.load(partial.lse + place, mask=is_part, other=float("-inf"))
        output = tl.load(
            partial.output + place[:, :, None] * VALUE_DIM + column[None, None, :],
            mask=is_part[:, :, None] & is_column[None, None, :], other=0.0,
        )  # fmt: skip
        row_max, row_sum, accumulator = merge_rows(row_max, row_sum, accumulator, lse, output)
    output, lse = finish_rows(row_max, row_sum, accumulator)
    output_row = first_row * NUM_HEADS + row
    tl.store(out.lse + output_row, lse * 0.6931471805599453, mask=is_row & (tl.program_id(1) == 0))
    tl.store(
        out.output + output_row[:, None] * VALUE_DIM + column[None, :],
        output[0].to(out.output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :],
    )  # fmt: skip


@triton.jit
def _find_tiles(
    batch, cut, num_shares, tile, SHAPE: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_MERGED: tl.constexpr,
    BLOCK_PART: tl.constexpr,
):  # fmt: skip
    """Returns what is `Found` of a tile; where there is no such tile, only `total` has a meaning."""
    IS_ORDERED: tl.constexpr = SHAPE.SHARE_TILES > 0
    request, first_tile, num_tiles = tl.zeros([], tl.int64), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    before, begin, num_parts = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    passed, num_short, total = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        other = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
        is_live = other < batch.batch_size
        if IS_ORDERED:
            first_share, parts = request_shares(batch, other, SHAPE)
            stops = passed + tl.cumsum(parts)
            first, passed = stops - parts, tl.max(stops)
            # malformed tables may name more shares than there are: theirs was not stored
            parts = tl.minimum(parts, num_shares - first)
            # the same are merged at once wherever a window lets a request begin
            begins = -(first_share % BLOCK_PART)
            tile_rows = BLOCK_MERGED
        else:
            first, parts, passed, num_short = request_chunks(batch, cut, start, passed, num_short, SHAPE, BLOCK_BATCH)
            begins = first * 0
            tile_rows = tl.where(parts <= FEW_PARTS, FEW_PARTS_ROWS, BLOCK_MERGED)
        _, num_tokens = request_rows(batch.lengths.qo_indptr, other, batch.num_query, batch.num_rows, is_live)
        tiles = tl.cdiv(num_tokens * SHAPE.NUM_KV_HEADS * SHAPE.GROUP_SIZE, tile_rows)
        tiles = tl.where(is_live & (parts > 1), tiles, 0)
        tile_stops = total + tl.cumsum(tiles)
        total = tl.max(tile_stops)
        is_it = (tile_stops - tiles <= tile) & (tile < tile_stops)
        request += tl.sum(tl.where(is_it, other, 0))
        first_tile += tl.sum(tl.where(is_it, tile_stops - tiles, 0))
        num_tiles += tl.sum(tl.where(is_it, tiles, 0))
        before += tl.sum(tl.where(is_it, first, 0))
        begin += tl.sum(tl.where(is_it, begins, 0))
        num_parts += tl.sum(tl.where(is_it, parts, 0))
    return Found(request, first_tile, num_tiles, before, begin, num_parts, total)


@triton.jit(
    do_not_specialize=["table_size", "batch_size", "num_query", "num_rows", "num_drafts", "reach", "num_shares"]
)
def _merge_kernel(
    # inputs
    lengths,
    partial,
    # outputs
    out,
    # sizes
    table_size,
    batch_size,
    num_query,
    num_rows,
    num_drafts,
    reach,
    num_shares,
    SHAPE: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_MERGED: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Merges the parts of its tiles of rows (token, head), an even share of those of all requests, some columns each.

    The lengths tell which tiles; the attention before does not write them, so tiles are found while it ends.
    """
    IS_ORDERED: tl.constexpr = SHAPE.SHARE_TILES > 0
    # no page is looked up
    batch = Batch(lengths, 0, table_size, batch_size, num_query, num_rows, num_drafts, reach)
    cut = None
    if not IS_ORDERED:
        cut = find_cut(batch, num_shares, LEAST_BLOCKS, SHAPE, BLOCK_BATCH)
    total = _find_tiles(batch, cut, num_shares, -1, SHAPE, BLOCK_BATCH, BLOCK_MERGED, BLOCK_PART).total.to(tl.int64)
    tile = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
    stop = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
    await_predecessor(ENABLE_PDL)
    while tile < stop:
        found = _find_tiles(batch, cut, num_shares, tile, SHAPE, BLOCK_BATCH, BLOCK_MERGED, BLOCK_PART)
        request_stop = tl.minimum(stop, found.first_tile + found.num_tiles)
        is_few = False if IS_ORDERED else found.num_parts <= FEW_PARTS
        for each in range(tile, request_stop):
            if is_few:
                _merge_tile(
                    partial, out, batch, found, each,
                    SHAPE=SHAPE, BLOCK_DIM=BLOCK_DIM, BLOCK_MERGED=FEW_PARTS_ROWS, BLOCK_PART=FEW_PARTS,
                )  # fmt: skip
            else:
                _merge_tile(
                    partial, out, batch, found, each,
                    SHAPE=SHAPE, BLOCK_DIM=BLOCK_DIM, BLOCK_MERGED=BLOCK_MERGED, BLOCK_PART=BLOCK_PART,
                )  # fmt: skip
        tile = request_stop


def allocate_partial(arguments: dict, num_places: int) -> Output:
    """Allocates the results of parts, fp32 [places, tokens, heads, D], and their log-sum-exp."""
    *_, num_heads, head_dim = arguments["out"].output.shape
    shape, device = (num_places, arguments["num_query"], num_heads), arguments["out"].output.device
    return Output(
        torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def launch_merge(op: str, num_shares: int, num_merged: int, num_parts: int, arguments: dict, **cutting: int) -> None:
    """Launches the merge of the partial results of at most num_shares shares into `out`.

    num_merged, num_parts: rows (token, head), and parts of each, that are merged at once. arguments: those that the
    kernel of the shares took. cutting: its LEAST_BLOCKS, and BLOCK_BATCH, the requests that are read at once.
    """
    output, lse = arguments["out"]
    merging = tuning.row(MERGE_TUNING, output.device)
    block_dim = min(first_columns(output.shape[-1]), COLUMNS)
    num_programs = merging["programs"] * target.num_multiprocessors(output.device)
    launch(
        op,
        _merge_kernel,
        (min(lse.numel(), num_programs), triton.cdiv(output.shape[-1], block_dim)),
        num_shares=num_shares,
        BLOCK_DIM=block_dim,
        BLOCK_MERGED=num_merged,
        BLOCK_PART=num_parts,
        **{name: arguments[name] for name in MERGE_TAKES},
        **cutting,
        **tuning.compiler_options(merging),
    )
