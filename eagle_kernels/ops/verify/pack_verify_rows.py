"""Packs the nodes of ragged requests into rows without gaps, as a server's forward pass reads them.

Computes: Request b has num_tokens[b] rows, after those of the requests before it. The maps from rows to requests and
    nodes are made on the device, so that nothing has to be copied to the host (FastDeploy's virtual padding).
Invariants: The first max_rows rows are those that more room would have given. No token and no position is below 0, so
    that a gather by them stays in bounds.
Grid: (max(B, 1),), one program writes one request's rows, its bound and its share of the unused tail.
Launches: 1
Traffic: element sizes * (number of rows + 2 B) read (all counts by every program, from the cache), 24 * max_rows + 4 (B
    + 3) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `pack_verify_rows` returns."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    row_to_batch: torch.Tensor
    row_to_node: torch.Tensor
    cu_seqlens: torch.Tensor
    num_rows: torch.Tensor
    overflow: torch.Tensor


# A program packs one request, BLOCK_ROW nodes at a time.
TUNING = {"default": {"BLOCK_ROW": 128, "num_warps": 1}}


@triton.jit(do_not_specialize=["stride_draft_tokens_batch", "stride_positions_batch", "batch_size", "num_nodes",
                               "max_rows"])  # fmt: skip
def _pack_verify_rows_kernel(
    draft_tokens_ptr, num_tokens_ptr, positions_ptr, seq_lens_ptr, out, stride_draft_tokens_batch,
    stride_positions_batch, batch_size, num_nodes, max_rows,
    BLOCK_BATCH: tl.constexpr, BLOCK_ROW: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    is_request = request < batch_size  # an empty batch still has one program, for its bound and its tail
    sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
    sum_total = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        counts = tl.minimum(read_lengths(num_tokens_ptr, other, other < batch_size), num_nodes)
        sum_before += tl.where(other < request, counts, 0)
        sum_total += counts
    begin = tl.sum(sum_before)
    total = tl.sum(sum_total)
    count = tl.minimum(read_lengths(num_tokens_ptr, request, is_request), num_nodes)
    if positions_ptr is None:
        seq_len = tl.load(seq_lens_ptr + request, mask=is_request, other=0).to(tl.int64)

    # rows that have no room are neither read nor written
    stop = tl.minimum(count, max_rows - begin)
    for start in range(0, stop, BLOCK_ROW):
        node = start + tl.arange(0, BLOCK_ROW)
        is_row = node < stop
        row = begin + node
        token_ptr = draft_tokens_ptr + request * stride_draft_tokens_batch + node
        token = tl.load(token_ptr, mask=is_row, other=0).to(tl.int64)
        if positions_ptr is None:
            position = seq_len + node
        else:
            position_ptr = positions_ptr + request * stride_positions_batch + node
            position = tl.load(position_ptr, mask=is_row, other=0).to(tl.int64)
        tl.store(out.input_ids + row, tl.maximum(token, 0), mask=is_row)
        tl.store(out.positions + row, tl.maximum(position, 0), mask=is_row)
        tl.store(out.row_to_batch + row, tl.zeros([BLOCK_ROW], tl.int32) + request.to(tl.int32), mask=is_row)
        tl.store(out.row_to_node + row, node.to(tl.int32), mask=is_row)
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    fill_unused(out.input_ids, total, max_rows, part, num_parts, 0, BLOCK_ROW)
    fill_unused(out.positions, total, max_rows, part, num_parts, 0, BLOCK_ROW)
    fill_unused(out.row_to_batch, total, max_rows, part, num_parts, -1, BLOCK_ROW)
    fill_unused(out.row_to_node, total, max_rows, part, num_parts, -1, BLOCK_ROW)

    tl.store(out.cu_seqlens + request + 1, tl.minimum(begin + count, max_rows).to(tl.int32), mask=is_request)
    if request == 0:
        tl.store(out.cu_seqlens, 0)
        tl.store(out.num_rows, tl.minimum(total, max_rows).to(tl.int32))
        store_overflow(out.overflow, total, max_rows)


def contract(values: dict) -> Output:
    args = check.Arguments("pack_verify_rows", values)
    args.tensor("draft_tokens", ("B", "N"), check.INTEGER, contiguous=1)
    num_tokens = args.tensor("num_tokens", ("B",), check.INTEGER)
    positions = args.tensor("positions", ("B", "N"), check.INTEGER, optional=True, contiguous=1)
    seq_lens = args.tensor("seq_lens", ("B",), check.INTEGER, optional=True)
    if positions is None and seq_lens is None:
        args.fail("at least one of positions and seq_lens", "be given", "none of them")
    max_rows = check_capacity(args, "max_rows")
    num_nodes = args.size("N")
    args.debug("num_tokens", f"lie in 0..{num_nodes}", lambda: (num_tokens >= 0) & (num_tokens <= num_nodes))
    args.debug("num_tokens", f"fit into max_rows = {max_rows} rows", lambda: num_tokens.cumsum(0) <= max_rows)
    rows, indices = args.spec((max_rows,), torch.int64), args.spec((max_rows,), torch.int32)
    one = args.spec((1,), torch.int32)
    return Output(rows, rows, indices, indices, args.spec((args.size("B") + 1,), torch.int32), one, one)


@launcher
def pack_verify_rows(
    draft_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    max_rows: int,
    out: Output | None = None,
) -> Output:
    """Packs the first nodes of every request into rows without gaps, as a server's forward pass reads them.

    Symbols: B requests, N nodes of a request. A request with 0 tokens has no rows; packing prompts is up to the caller.

    Args:
        draft_tokens: [B, N] int. The root, then the drafts; below 0 they count as 0. Requests may be strided.
        num_tokens: [B] int. Rows of each request, from node 0 on; clamped to 0..N.
        positions: None or [B, N] int. Positions of the nodes; below 0 they count as 0. Requests may be strided.
        seq_lens: None or [B] int. Only without `positions`, and then needed: node i has position seq_len + i.
        max_rows: room for the rows of all requests, at most 2^31 - 1.
        out: seven tensors to write into.

    Returns:
        A named tuple; each list ends with a tail of unused rows:
        input_ids: [max_rows] int64. Tokens, 0 in the tail.
        positions: [max_rows] int64. 0 in the tail.
        row_to_batch: [max_rows] int32. Request of each row, -1 in the tail.
        row_to_node: [max_rows] int32. Node of each row, -1 in the tail.
        cu_seqlens: [B + 1] int32. First row of each request, then the end of the last; at most max_rows.
        num_rows: [1] int32. Rows in use, at most max_rows.
        overflow: [1] int32. The rows needed if more than max_rows, else 0; rows past max_rows are dropped.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks num_tokens, and that
            the rows fit.

    Source:
        eagle_kernels' own; rows name their requests, as in FastDeploy's virtual padding.

    Example:
        >>> rows = eagle_kernels.pack_verify_rows(
        ...     torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([1, 2]), seq_lens=torch.tensor([10, 20]), max_rows=4)
        >>> rows.input_ids.tolist(), rows.positions.tolist(), rows.cu_seqlens.tolist()
        ([7, 4, 5, 0], [10, 20, 21, 0], [0, 1, 3])
    """
    out = check.allocate("pack_verify_rows", contract(locals()), out)
    batch_size, num_nodes = draft_tokens.shape
    launch(
        "pack_verify_rows", _pack_verify_rows_kernel, (max(batch_size, 1),),
        draft_tokens_ptr=draft_tokens, num_tokens_ptr=num_tokens, positions_ptr=positions,
        seq_lens_ptr=seq_lens if positions is None else None, out=out,
        stride_draft_tokens_batch=draft_tokens.stride(0),
        stride_positions_batch=0 if positions is None else positions.stride(0),
        batch_size=batch_size, num_nodes=num_nodes, max_rows=max_rows,
        BLOCK_BATCH=128, **tuning.row(TUNING, draft_tokens.device),
    )  # fmt: skip
    return out
