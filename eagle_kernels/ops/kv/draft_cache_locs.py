"""Lists the slots that draft steps write: one for every step of every branch, and copies of the prefix's last page.

Computes: The slots of draft tokens 0..num_steps - 1 of branch z = b * K + k, which `draft_kv_indices` lists for
    reading, for K = topk branches of a request and pages of P tokens. With pages and several branches each branch has
    its own pages, and some of the columns are left out:

        P = 4, num_steps = 5, seq_len = 9, K = 2: p prefix, x draft, . unused, c copy
        p p p p p p p p|p x x x x x . .|c x x x x x . .
          whole pages  |   branch 0    |   branch 1

    Attention that reads whole pages then needs the prefix's partial last page in front of every branch except branch 0,
    whose first page it is: for each branch k >= 1 the seq_len % P slots after the last full page are copied to those in
    front of the branch.
Invariants: No copy is written past `capacity`, and no bound exceeds it; nothing outside the table is read.
Grid: (max(B * K, 1),) for B requests, one program writes what belongs to one branch and its share of the unused tails.
Launches: 1
Traffic: element size * (B * K * num_steps + 2 * copies) read, 8 B * (B * K * (num_steps + 1) + 2 * capacity) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, fill_unused, read_lengths, store_overflow
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
    """What `draft_cache_locs` returns."""

    cache_locs: torch.Tensor
    positions: torch.Tensor
    copy_indptr: torch.Tensor
    source_locs: torch.Tensor
    target_locs: torch.Tensor
    overflow: torch.Tensor


MAX_STEPS = 64

# A program lists a branch's slots, block by block, after it has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_SLOT": 256, "num_warps": 1}}


@triton.jit(
    do_not_specialize=[*ROW_SIZES, "batch_size", "capacity", "stride_cache_locs_branch", "stride_cache_locs_step"]
)
def _draft_cache_locs_kernel(
    rows, seq_lens_ptr, out,
    num_rows, row_size, stride_req_to_token_row, batch_size, capacity, stride_cache_locs_branch, stride_cache_locs_step,
    TOPK: tl.constexpr, NUM_STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_BATCH: tl.constexpr,
    BLOCK_SLOT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    branch = tl.program_id(0).to(tl.int64)
    request = branch // TOPK
    rank = branch % TOPK
    is_live = request < batch_size  # an empty batch has one program, for its bound and tails

    seq_len = read_lengths(seq_lens_ptr, request, is_live)
    row = find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row)
    step = tl.arange(0, next_power_of_2(NUM_STEPS))
    is_step = is_live & (step < NUM_STEPS)
    first_column = first_draft_column(seq_len, rank, TOPK, NUM_STEPS, PAGE_SIZE)
    slot = read_slots(row, first_column + step, is_step)
    place = branch * stride_cache_locs_branch + step.to(tl.int64) * stride_cache_locs_step
    tl.store(out.cache_locs + place, slot, mask=is_step)
    tl.store(out.positions + branch, seq_len, mask=is_live)

    # copies of the prefix's partial last page, seq_len % P slots for each branch but the first
    begin = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    if (PAGE_SIZE > 1) and (TOPK > 1):
        sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
        sum_total = tl.zeros([BLOCK_BATCH], tl.int64)
        for start in range(0, batch_size, BLOCK_BATCH):
            other = start + tl.arange(0, BLOCK_BATCH)
            counts = read_lengths(seq_lens_ptr, other, other < batch_size) % PAGE_SIZE
            sum_before += tl.where(other < request, counts, 0)
            sum_total += counts
        count = seq_len % PAGE_SIZE
        begin = tl.sum(sum_before) * (TOPK - 1)
        total = tl.sum(sum_total) * (TOPK - 1)
        slots = tl.arange(0, BLOCK_SLOT)
        for start in range(0, tl.where(rank > 0, count, 0), BLOCK_SLOT):
            entry = start + slots
            is_copied = entry < count
            source = read_slots(row, seq_len - count + entry, is_copied)
            target = read_slots(row, first_column - count + entry, is_copied)
            exists = (source >= 0) & (target >= 0)
            copy = begin + (rank - 1) * count + entry
            in_bounds = is_copied & (copy < capacity)
            tl.store(out.source_locs + copy, tl.where(exists, source, -1), mask=in_bounds)
            tl.store(out.target_locs + copy, tl.where(exists, target, -1), mask=in_bounds)
    fill_unused(out.source_locs, total, capacity, branch, tl.num_programs(0), -1, BLOCK_SLOT)
    fill_unused(out.target_locs, total, capacity, branch, tl.num_programs(0), -1, BLOCK_SLOT)
    if rank == 0:
        end = tl.minimum(begin + count * (TOPK - 1), capacity)
        tl.store(out.copy_indptr + request + 1, end.to(tl.int32), mask=is_live)
        if request == 0:
            tl.store(out.copy_indptr, 0)
            store_overflow(out.overflow, total, capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("draft_cache_locs", values)
    topk = args.integer("topk", 1)
    num_steps = args.integer("num_steps", 1, MAX_STEPS)
    page_size = args.integer("page_size", 1)
    check_rows(args)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    if args.size("B") * topk > check.MAX_INT32:
        args.fail("topk", f"give the B = {args.size('B')} requests at most {check.MAX_INT32} branches in all", topk)
    seq_lens = values["seq_lens"]
    stop, is_draft, end = draft_columns(seq_lens, topk, num_steps, page_size)

    def is_read(column):
        # the prefix's last page, and in each branch's first page what its copy takes
        in_page = seq_lens.clamp(min=0) % page_size
        room = (in_page + num_steps + page_size - 1) // page_size * page_size
        place = column - (seq_lens.clamp(min=0) - in_page)[:, None]
        is_copied = (place >= 0) & (place % room[:, None] < in_page[:, None])
        return is_draft(column) | (is_copied & (topk > 1))

    debug_rows(args, ("seq_lens",), stop, is_read, "leave room for the drafts")
    num_branches = args.size("B") * topk
    if values["capacity"] is not None:
        capacity = check_capacity(args)
    else:
        capacity = args.size("B") * (topk - 1) * (page_size - 1)
        if capacity > check.MAX_INT32:
            args.fail("capacity", f"be given where B * (topk - 1) * (page_size - 1) exceeds {check.MAX_INT32}", None)
    shape = (num_steps, num_branches) if values["is_step_major"] else (num_branches, num_steps)

    def slots(shape: tuple[int, ...], position: int) -> check.Spec:
        return check_listed(args, args.integers(shape, position, default=torch.int64), end, is_read)

    return Output(
        slots(shape, 0), args.integers((num_branches,), 1, default=torch.int64),
        args.spec((args.size("B") + 1,), torch.int32),
        slots((capacity,), 3), slots((capacity,), 4), args.spec((1,), torch.int32),
    )  # fmt: skip


@launcher
def draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    num_steps: int,
    page_size: int = 1,
    capacity: int | None = None,
    is_step_major: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists the slots that draft steps write, and the slots to copy first if branches have pages of their own.

    Draft j of branch k is in column seq_len + k * num_steps + j of the request's row if P or K is 1. Otherwise it is in
    column `seq_len // P * P + k * ceil((seq_len % P + num_steps) / P) * P + seq_len % P + j`: each branch has pages of
    its own, and branches k >= 1 need a copy of the prefix's partial last page in front of them.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int. Pool slot of token t of a row in column t. Rows may be strided.
        seq_lens: [B] int. Tokens of each prefix; negative ones count as 0.
        topk: K, branches of a request, at least 1.
        num_steps: draft steps, 1..64.
        page_size: P, tokens of a page, at least 1.
        capacity: room for all copies. (K - 1) * (sum of seq_lens % P) is enough; none are made if P or K is 1. None:
            enough for any lengths, B * (K - 1) * (P - 1), which must be below 2^31.
        is_step_major: `cache_locs` is [num_steps, B * K].
        out: six tensors to write into.

    Returns:
        A named tuple, whose int64 is int32 where `out` holds int32:
        cache_locs: [B * K, num_steps] int64. Slots of branch b * K + k; -1 where the table has none.
        positions: [B * K] int64. seq_len, the position of each branch's first draft.
        copy_indptr: [B + 1] int32. Where the copies of each request begin and end in the next two lists, branch by
            branch.
        source_locs: [capacity] int64. Slots to copy from, -1 padded.
        target_locs: [capacity] int64. Slots to copy to, -1 padded. If one slot of a copy is -1, both are.
        overflow: [1] int32. The room needed if it exceeds `capacity`, where lists and bounds end; else 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative seq_lens and entries, and places outside the table.

    Source:
        SGLang's assign_draft_cache_locs_contiguous and, for pages, duplicate_prefix_tail_to_draft_branches. Both in one
        launch is eagle_kernels' own.

    Example:
        >>> listed = eagle_kernels.draft_cache_locs(
        ...     torch.tensor([0]), torch.arange(12)[None], torch.tensor([5]), topk=2, num_steps=2, page_size=4)
        >>> listed.cache_locs.tolist()  # branch 1 is on a page of its own, slots 8 to 11
        [[5, 6], [9, 10]]
        >>> listed.source_locs.tolist(), listed.target_locs.tolist()  # with a copy of token 4
        ([4, -1, -1], [8, -1, -1])
    """
    out = check.allocate("draft_cache_locs", contract(locals()), out)
    batch_size, num_branches = seq_lens.shape[0], seq_lens.shape[0] * topk
    launch(
        "draft_cache_locs", _draft_cache_locs_kernel, (max(num_branches, 1),),
        seq_lens_ptr=seq_lens, out=out, **row_arguments(req_pool_indices, req_to_token), batch_size=batch_size,
        capacity=out.source_locs.shape[0], stride_cache_locs_branch=1 if is_step_major else num_steps,
        stride_cache_locs_step=num_branches if is_step_major else 1,
        TOPK=topk, NUM_STEPS=num_steps, PAGE_SIZE=page_size, **tuning.row(TUNING, seq_lens.device),
    )  # fmt: skip
    return out
