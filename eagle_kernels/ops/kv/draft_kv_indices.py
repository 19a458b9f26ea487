"""Token-level KV indices of every draft step: each branch's prefix and then its own chain of draft slots.

Computes: For draft step s and branch z = b * K + k, the pool slots that the branch attends to: those of the request's
    seq_len prefix tokens, then of its s + 1 own draft tokens, for K = topk branches of a request. A window drops what
    lies before it, except the first sink_size tokens of the prefix. By default the same prefix stays at every step, and
    all drafts; with window_counts_drafts the window moves on by a token each step, past the first drafts if it is
    small.
Invariants: No index is written past `capacity`, and no bound exceeds it; nothing outside the table is read.
Grid: (max(B * K, 1), chunks, 1) for B requests, one program writes every chunks-th block of one branch's prefix to all
    steps, and its share of the unused tails; chunk 0 writes the branch's draft slots and bounds as well. With
    window_counts_drafts (max(B * K, 1), chunks, num_steps), one program for each step.
Launches: 1
Traffic: K * (index bytes * sum of the prefix tokens kept) read, with window_counts_drafts once a step; 4 B * num_steps
    * (capacity + B * K + 1) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, check_keep_unused, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.rows import (
    ROW_SIZES,
    check_listed,
    check_rows,
    debug_rows,
    draft_columns,
    find_row,
    first_draft_column,
    read_slots,
    row_arguments,
)


class Output(NamedTuple):
    """What `draft_kv_indices` returns."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


MAX_STEPS = 64

# Up to max_chunks programs write a request's list, block by block, after each has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_INDEX": 512, "max_chunks": 32, "num_warps": 4}}


@triton.jit
def _window(seq_len, num_drafts, window_size, sink_size):
    """Returns what a branch keeps if its window counts num_drafts drafts: (sink tokens, first of prefix, of drafts)."""
    sink = tl.minimum(seq_len, sink_size)
    first = seq_len + num_drafts - window_size
    return sink, tl.minimum(tl.maximum(first, sink), seq_len), tl.maximum(first - seq_len, 0)


@triton.jit
def _count(seq_len, num_drafts, window_size, sink_size):
    """Returns how many indices a branch then keeps."""
    sink, recent, draft = _window(seq_len, num_drafts, window_size, sink_size)
    return sink + seq_len - recent + num_drafts - draft


@triton.jit(
    do_not_specialize=[*ROW_SIZES, "batch_size", "capacity", "window_size", "sink_size", "stride_kv_indptr_step",
                       "stride_kv_indices_step"]
)  # fmt: skip
def _draft_kv_indices_kernel(
    rows, seq_lens_ptr, out,
    num_rows, row_size, stride_req_to_token_row, batch_size, capacity, window_size, sink_size, stride_kv_indptr_step,
    stride_kv_indices_step,
    TOPK: tl.constexpr, NUM_STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr, COUNTS_DRAFTS: tl.constexpr,
    KEEPS_UNUSED: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_INDEX: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    branch = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    # a program writes all steps, or only one if the prefix differs from step to step
    first_step = tl.program_id(2)
    stop_step = first_step + 1 if COUNTS_DRAFTS else NUM_STEPS
    request = branch // TOPK
    is_live = request < batch_size  # an empty batch has one program, for its bounds and tails

    seq_len = read_lengths(seq_lens_ptr, request, is_live)
    row = find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row)
    num_drafts = first_step + 1
    # a window that ends with the prefix counts no drafts
    window_drafts = num_drafts if COUNTS_DRAFTS else 0
    drafts_apart = 0 if COUNTS_DRAFTS else num_drafts
    before = tl.zeros([BLOCK_BATCH], tl.int64)
    total = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        lengths = read_lengths(seq_lens_ptr, other, other < batch_size)
        counts = _count(lengths, window_drafts, window_size, sink_size) + drafts_apart
        counts = tl.where(other < batch_size, counts, 0)
        before += tl.where(other < request, counts, 0)
        total += counts
    sink, recent, draft_start = _window(seq_len, window_drafts, window_size, sink_size)
    num_entries = sink + seq_len - recent  # of the prefix that are kept
    own_count = _count(seq_len, window_drafts, window_size, sink_size) + drafts_apart
    # where the branch's indices start, and the unused tail; at each further step every earlier branch has one more
    begin = tl.sum(before) * TOPK + branch % TOPK * own_count
    tail = tl.sum(total) * TOPK
    num_branches = batch_size.to(tl.int64) * TOPK

    # prefix: read once, written to every step
    index = tl.arange(0, BLOCK_INDEX).to(tl.uint32)  # unsigned: places past the largest capacity do not become negative
    skipped = (recent - sink).to(tl.uint32)
    stop = tl.minimum(num_entries, capacity).to(tl.int32)
    for start in range(chunk * BLOCK_INDEX, stop, num_chunks * BLOCK_INDEX):
        entry = start + index
        column = entry + tl.where(entry < sink.to(tl.uint32), 0, skipped)
        is_entry = entry < num_entries.to(tl.uint32)
        slot = read_slots(row, column, is_entry).to(out.kv_indices.dtype.element_ty)
        for step in range(first_step, stop_step):
            place = tl.minimum(begin + branch * (step - first_step), capacity).to(tl.uint32) + entry
            step_ptr = out.kv_indices + step * stride_kv_indices_step.to(tl.int64)
            tl.store(step_ptr + place, slot, mask=is_entry & (place < capacity.to(tl.uint32)))

    for step in range(first_step, stop_step):
        step_ptr = out.kv_indices + step * stride_kv_indices_step.to(tl.int64)
        step_begin, step_tail = begin + branch * (step - first_step), tail + num_branches * (step - first_step)
        if not KEEPS_UNUSED:
            # all programs share the unused tail
            fill_unused(
                step_ptr, step_tail, capacity, branch * num_chunks + chunk, tl.num_programs(0) * num_chunks, -1,
                BLOCK_INDEX,
            )  # fmt: skip
        if chunk == 0:
            # draft slots: step s has the branch's draft tokens 0..s, as far as the window reaches back
            draft = tl.arange(0, next_power_of_2(NUM_STEPS))
            column = first_draft_column(seq_len, branch % TOPK, TOPK, NUM_STEPS, PAGE_SIZE) + draft
            is_draft = is_live & (draft <= step) & (draft >= draft_start)
            slot = read_slots(row, column, is_draft).to(out.kv_indices.dtype.element_ty)
            place = step_begin + num_entries + draft - draft_start
            tl.store(step_ptr + place, slot, mask=is_draft & (place < capacity))
            # bounds
            bound_ptr = out.kv_indptr + step * stride_kv_indptr_step.to(tl.int64)
            end = tl.minimum(step_begin + own_count + (step - first_step), capacity)
            tl.store(bound_ptr + branch + 1, end.to(tl.int32), mask=is_live)
            if branch == 0:
                tl.store(bound_ptr, 0)
                if step == NUM_STEPS - 1:  # which needs the most
                    store_overflow(out.overflow, step_tail, capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("draft_kv_indices", values)
    topk = args.integer("topk", 1)
    num_steps = args.integer("num_steps", 1, MAX_STEPS)
    capacity = check_capacity(args)
    args.integer("page_size", 1)
    window_size = args.integer("window_size", 0, check.MAX_INT32)
    if args.integer("sink_size", 0, check.MAX_INT32) > 0 and window_size == 0:
        args.fail("sink_size", "be 0 without a window_size", values["sink_size"])
    if values["window_counts_drafts"] and window_size == 0:
        args.fail("window_counts_drafts", "come with a window_size", True)
    check_keep_unused(args)
    check_rows(args)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    if args.size("B") * topk > check.MAX_INT32:
        args.fail("topk", f"give the B = {args.size('B')} requests at most {check.MAX_INT32} branches in all", topk)
    seq_lens = values["seq_lens"]
    stop, is_draft, end = draft_columns(seq_lens, topk, num_steps, values["page_size"])

    def is_read(column):
        # a window that counts drafts sees the most of the prefix at the first step
        first = seq_lens - window_size + int(values["window_counts_drafts"]) if window_size else seq_lens * 0
        is_seen = (column >= first[:, None]) | (column < values["sink_size"])
        return ((column < seq_lens[:, None]) & is_seen) | is_draft(column)

    debug_rows(args, ("seq_lens",), stop, is_read, "leave room for the drafts")
    return Output(
        args.spec((num_steps, args.size("B") * topk + 1), torch.int32, contiguous=1),
        check_listed(args, args.integers((num_steps, capacity), 1, contiguous=1), end, is_read),
        args.spec((1,), torch.int32),
    )


@launcher
def draft_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    num_steps: int,
    capacity: int,
    page_size: int = 1,
    window_size: int = 0,
    sink_size: int = 0,
    window_counts_drafts: bool = False,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists the KV slots that each branch attends to at every draft step: the prefix, then the branch's own drafts.

    The drafts' columns are those of `draft_cache_locs`.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int. Pool slot of token t of a row in column t. Rows may be strided.
        seq_lens: [B] int. Tokens of each prefix; negative ones count as 0.
        topk: K, branches of a request, at least 1.
        num_steps: draft steps, 1..64.
        capacity: room for the indices of one step. K * (sum of seq_lens + B * num_steps) is always enough; with a
            window, so is K * B * (window_size + sink_size + num_steps).
        page_size: P, tokens of a page, at least 1. It decides where drafts are; the indices are slots all the same.
        window_size: how many of the prefix's last tokens are seen, in addition to all drafts. 0: all of them.
        sink_size: with a window, how many of the prefix's first tokens are seen as well.
        window_counts_drafts: the window, which is required, holds the last `window_size` tokens of prefix and drafts,
            and moves by one token each step.
        keep_unused: unused tails of `out.kv_indices` stay as they are.
        out: three tensors to write into. Rows of the first two may be strided.

    Returns:
        A named tuple:
        kv_indptr: [num_steps, B * K + 1] int32. Where the list of branch b * K + k begins and ends in `kv_indices` of
            each step.
        kv_indices: [num_steps, capacity] int32, or int64 if `out` holds int64. Pool slots, -1 padded; -1 also where the
            table has none.
        overflow: [1] int32. The room that the last step needs if it exceeds `capacity`, where lists and bounds end;
            else 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative seq_lens and entries, and places outside the table.

    Source:
        SGLang's generate_draft_decode_kv_indices; with `window_counts_drafts` its
        generate_draft_decode_window_kv_indices.

    Example:
        >>> listed = eagle_kernels.draft_kv_indices(
        ...     torch.tensor([0]), torch.arange(8)[None], torch.tensor([2]), topk=2, num_steps=2, capacity=8)
        >>> listed.kv_indices.tolist()  # the prefix 0, 1; drafts 2, 3 of branch 0 and 4, 5 of branch 1
        [[0, 1, 2, 0, 1, 4, -1, -1], [0, 1, 2, 3, 0, 1, 4, 5]]
    """
    out = check.allocate("draft_kv_indices", contract(locals()), out)
    batch_size, row_size = seq_lens.shape[0], req_to_token.shape[1]
    tuned = dict(tuning.row(TUNING, seq_lens.device))
    most_entries = min(row_size, window_size + sink_size) if window_size else row_size
    num_chunks = max(1, min(tuned.pop("max_chunks"), triton.cdiv(most_entries, tuned["BLOCK_INDEX"])))
    launch(
        "draft_kv_indices", _draft_kv_indices_kernel,
        (max(batch_size * topk, 1), num_chunks, num_steps if window_counts_drafts else 1),
        seq_lens_ptr=seq_lens, out=out, **row_arguments(req_pool_indices, req_to_token),
        batch_size=batch_size, capacity=capacity,
        # without a window the kernel gets one that leaves nothing out
        window_size=window_size or check.MAX_INT32, sink_size=sink_size,
        stride_kv_indptr_step=out.kv_indptr.stride(0), stride_kv_indices_step=out.kv_indices.stride(0),
        TOPK=topk, NUM_STEPS=num_steps, PAGE_SIZE=page_size, COUNTS_DRAFTS=window_counts_drafts,
        KEEPS_UNUSED=keep_unused, **tuned,
    )  # fmt: skip
    return out
