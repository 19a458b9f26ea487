"""Merges the partial results of requests whose keys were cut into several shares."""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .attention import Output
from .batch import Batch, request_rows
from .columns import first_columns
from .cuts import find_parts
from .ordered_shares import count_shares_before, request_shares
from .softmax import finish_rows, merge_rows, start_rows

# columns of a head that a program merges: more, of all rows and parts at once, would not fit into registers
COLUMNS = 128
# of what the kernel of the shares takes
MERGE_TAKES = (
    "lengths", "partial", "out", "table_size", "batch_size", "num_query", "num_rows", "num_drafts", "reach", "SHAPE",
)  # fmt: skip
# programs: of all requests together
MERGE_TUNING = {"default": {"programs": 2048, "num_warps": 4}}


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
    """Merges the shares of a request that has several, BLOCK_MERGED rows (token, head) at a time, some columns each.

    Which shares they are follows from the lengths, which the attention before does not write: they are found while it
    ends.
    """
    IS_ORDERED: tl.constexpr = SHAPE.SHARE_TILES > 0
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP_SIZE
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM if SHAPE.VALUE_DIM > 0 else SHAPE.HEAD_DIM // SHAPE.JOINED
    request = tl.program_id(0).to(tl.int64)
    # no page is looked up
    batch = Batch(lengths, 0, table_size, batch_size, num_query, num_rows, num_drafts, reach)
    first_row, num_tokens = request_rows(lengths.qo_indptr, request, num_query, num_rows, True)
    begin = tl.zeros([], tl.int32)
    if IS_ORDERED:
        first_share, num_parts = request_shares(batch, request, SHAPE)
        before = count_shares_before(batch, request, SHAPE)
        # malformed tables may name more shares than there are: theirs was not stored
        num_parts = tl.minimum(num_parts, num_shares - before)
        begin = -(first_share % BLOCK_PART)  # the same are merged at once wherever a window lets a request begin
    else:
        before, num_parts = find_parts(batch, request, num_shares, LEAST_BLOCKS, SHAPE, BLOCK_BATCH)
    await_predecessor(ENABLE_PDL)
    if num_parts > 1:
        column = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
        is_column = column < VALUE_DIM
        for tile in range(tl.program_id(1), tl.cdiv(num_tokens * NUM_HEADS, BLOCK_MERGED), tl.num_programs(1)):
            row = tile * BLOCK_MERGED + tl.arange(0, BLOCK_MERGED)
            is_row = row < num_tokens * NUM_HEADS
            row_max, row_sum, accumulator = start_rows(BLOCK_MERGED, BLOCK_DIM)
            for start in range(begin, num_parts, BLOCK_PART):
                part = start + tl.arange(0, BLOCK_PART)
                is_part = is_row[:, None] & ((part >= 0) & (part < num_parts))[None, :]
                place = before + part
                if not IS_ORDERED:  # see `chunks.py`: the last part of a chunk, and then the first ones
                    place = 2 * place + (part == 0).to(tl.int32)
                place = place.to(tl.int64)[None, :] * num_query * NUM_HEADS + row[:, None]
                lse = tl.load(partial.lse + place, mask=is_part, other=float("-inf"))
                output = tl.load(
                    partial.output + place[:, :, None] * VALUE_DIM + column[None, None, :],
                    mask=is_part[:, :, None] & is_column[None, None, :], other=0.0,
                )  # fmt: skip
                row_max, row_sum, accumulator = merge_rows(row_max, row_sum, accumulator, lse, output)
            output, lse = finish_rows(row_max, row_sum, accumulator)
            output_row = first_row * NUM_HEADS + row
            tl.store(out.lse + output_row, lse * 0.6931471805599453, mask=is_row & (tl.program_id(2) == 0))
            tl.store(
                out.output + output_row[:, None] * VALUE_DIM + column[None, :],
                output[0].to(out.output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :],
            )  # fmt: skip


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
    kernel of the shares took. cutting: its LEAST_BLOCKS, and the BLOCK_BATCH to find even chunks with.
    """
    *_, num_heads, head_dim = arguments["out"].output.shape
    num_requests = arguments["batch_size"]
    merging = tuning.row(MERGE_TUNING, arguments["out"].output.device)
    row_tiles = triton.cdiv(arguments["num_query"] * num_heads, num_merged)
    block_dim = min(first_columns(head_dim), COLUMNS)
    launch(
        op,
        _merge_kernel,
        (
            num_requests,
            min(row_tiles, triton.cdiv(merging["programs"], max(num_requests, 1))),
            triton.cdiv(head_dim, block_dim),
        ),
        num_shares=num_shares,
        BLOCK_DIM=block_dim,
        BLOCK_MERGED=num_merged,
        BLOCK_PART=num_parts,
        **{name: arguments[name] for name in MERGE_TAKES},
        **cutting,
        **tuning.compiler_options(merging),
    )
