"""Merges the partial results of requests whose keys were cut into several shares."""

from __future__ import annotations

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .attention import request_rows
from .softmax import finish_rows, merge_rows, start_rows

# columns of a head that a program merges: more, of all rows and parts at once, would not fit into registers
COLUMNS = 128
# programs: of all requests together
MERGE_TUNING = {"default": {"programs": 2048, "num_warps": 4}}


@triton.jit(do_not_specialize=["num_query", "num_rows", "num_shares"])
def _merge_kernel(
    # inputs
    qo_indptr_ptr,
    shares_ptr,
    partial_output_ptr,
    partial_lse_ptr,
    # outputs
    output_ptr,
    lse_ptr,
    # sizes
    num_query,
    num_rows,
    num_shares,
    IS_ORDERED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_MERGED: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Merges the shares of a request that has several, BLOCK_MERGED rows (token, head) at a time, some columns each."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    first_row, num_tokens = request_rows(qo_indptr_ptr, request, num_query, num_rows, True)
    has_rows = num_tokens > 0
    before = tl.load(shares_ptr + request * 3, mask=has_rows, other=0)
    num_parts = tl.load(shares_ptr + request * 3 + 1, mask=has_rows, other=0)
    begin = tl.zeros([], tl.int32)
    if IS_ORDERED:  # the same shares are merged at once wherever a window lets a request begin
        begin = -(tl.load(shares_ptr + request * 3 + 2, mask=has_rows, other=0) % BLOCK_PART)
    # malformed tables and plans may name more shares than there are: theirs was not stored
    num_parts = tl.where(before >= 0, tl.minimum(num_parts, num_shares - before), 0)
    if num_parts > 1:
        column = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
        is_column = column < HEAD_DIM
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
                lse = tl.load(partial_lse_ptr + place, mask=is_part, other=float("-inf"))
                output = tl.load(
                    partial_output_ptr + place[:, :, None] * HEAD_DIM + column[None, None, :],
                    mask=is_part[:, :, None] & is_column[None, None, :], other=0.0,
                )  # fmt: skip
                row_max, row_sum, accumulator = merge_rows(row_max, row_sum, accumulator, lse, output)
            output, lse = finish_rows(row_max, row_sum, accumulator)
            output_row = first_row * NUM_HEADS + row
            tl.store(lse_ptr + output_row, lse * 0.6931471805599453, mask=is_row & (tl.program_id(2) == 0))
            tl.store(
                output_ptr + output_row[:, None] * HEAD_DIM + column[None, :],
                output.to(output_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :],
            )  # fmt: skip


def launch_merge(
    op: str, num_shares: int, num_merged: int, num_parts: int, arguments: dict, shared: dict, *, is_ordered: bool
) -> None:
    """Launches the merge of the partial results of at most num_shares shares into `output_ptr` and `lse_ptr`.

    num_merged, num_parts: rows (token, head), and parts of each, that are merged at once. arguments, shared: what the
    kernel of the shares took.
    """
    output = arguments["output_ptr"]
    num_heads, head_dim = output.shape[-2:]
    num_requests = arguments["batch_size"]
    merging = tuning.row(MERGE_TUNING, output.device)
    row_tiles = triton.cdiv(arguments["num_query"] * num_heads, num_merged)
    block_dim = min(arguments["BLOCK_DIM"], COLUMNS)
    names = ("qo_indptr_ptr", "output_ptr", "lse_ptr", "num_query", "num_rows")
    launch(
        op,
        _merge_kernel,
        (
            num_requests,
            min(row_tiles, triton.cdiv(merging["programs"], max(num_requests, 1))),
            triton.cdiv(head_dim, block_dim),
        ),
        num_shares=num_shares,
        IS_ORDERED=is_ordered,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_MERGED=num_merged,
        BLOCK_PART=num_parts,
        **{name: arguments[name] for name in names},
        **shared,
        **tuning.compiler_options(merging),
    )
