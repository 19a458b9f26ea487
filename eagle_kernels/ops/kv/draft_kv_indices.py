"""Token-level KV indices of every draft step: each branch's prefix and then its own chain of draft slots.

Computes
    For draft step s and branch z = b * K + k, the pool slots that the branch attends to: those of the request's seq_len
    prefix tokens, then of its s + 1 own draft tokens (SGLang's generate_draft_decode_kv_indices). Draft token j of
    branch k is in column seq_len + k * num_steps + j of the request's row where page_size or topk is 1; else every
    branch has its own pages: seq_len // P * P + k * ceil((seq_len % P + num_steps) / P) * P + seq_len % P + j.
Shapes
    req_pool_indices  [B]                       int    the request's row of req_to_token
    req_to_token      [R, C]                    int    the pool slot of every token; rows may be strided
    seq_lens          [B]                       int    prefix length
    topk              int                              K
    num_steps         int
    capacity          int                              room for the indices of one step
    page_size         int                              P
    -> kv_indptr      [num_steps, B * K + 1]    int32  where a branch's indices start, limited to capacity
    -> kv_indices     [num_steps, capacity]     int32  pool slots, -1 in the unused tail
    -> overflow       [1]                       int32  the room that the last step needs if it exceeds capacity, else 0
Invariants
    Every output is written whole. Indices past `capacity` are not written, and no bound exceeds it. Columns past C and
    rows outside 0..R - 1 are not read; their entries are -1. Negative lengths count as 0.
Grid
    (max(B * K, 1), chunks), one program writes every chunks-th block of one branch's prefix to all steps, and its share
    of the unused tails; chunk 0 writes the branch's draft slots and bounds as well.
Launches
    1
Traffic
    K * (index bytes * sum(seq_len)) read, 4 B * num_steps * (capacity + B * K + 1) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `draft_kv_indices` returns."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


MAX_STEPS = 64

TUNING = {"default": {"BLOCK_INDEX": 512, "max_chunks": 32, "num_warps": 4}}


@triton.jit
def _read_lengths(seq_lens_ptr, request, is_live):
    """Prefix lengths, limited so that no sum of them leaves int64."""
    length = tl.load(seq_lens_ptr + request, mask=is_live, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), 2147483647)


@triton.jit
def _read_slots(table_row_ptr, column, is_wanted, row_exists, row_size):
    """The pool slots in these columns of a request's row, -1 where there are none."""
    return tl.load(table_row_ptr + column, mask=is_wanted & row_exists & (column < row_size), other=-1).to(tl.int32)


@triton.jit(do_not_specialize=["batch_size", "num_rows", "row_size", "stride_req_to_token_row", "capacity"])
def _draft_kv_indices_kernel(
    # inputs
    req_pool_indices_ptr,
    req_to_token_ptr,
    seq_lens_ptr,
    # outputs
    kv_indptr_ptr,
    kv_indices_ptr,
    overflow_ptr,
    # sizes
    batch_size,
    num_rows,
    row_size,
    stride_req_to_token_row,
    capacity,
    TOPK: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_INDEX: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    branch = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    request = branch // TOPK
    is_live = request < batch_size  # an empty batch has one program, for its bounds and tails

    seq_len = _read_lengths(seq_lens_ptr, request, is_live)
    row = tl.load(req_pool_indices_ptr + request, mask=is_live, other=-1).to(tl.int64)
    row_exists = (row >= 0) & (row < num_rows)
    table_row_ptr = req_to_token_ptr + row * stride_req_to_token_row

    length_before = tl.zeros([BLOCK_BATCH], dtype=tl.int64)
    length_total = tl.zeros([BLOCK_BATCH], dtype=tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        length = _read_lengths(seq_lens_ptr, other, other < batch_size)
        length_before += tl.where(other < request, length, 0)
        length_total += length
    prefix_before = tl.sum(length_before) * TOPK + (branch % TOPK) * seq_len
    prefix_total = tl.sum(length_total) * TOPK
    num_branches = batch_size.to(tl.int64) * TOPK

    step = tl.arange(0, BLOCK_STEP)
    step_row = step.to(tl.int64) * capacity
    is_step = step < NUM_STEPS
    begin = prefix_before + branch * (step + 1)  # [step], where the branch's indices start

    # prefix: read once, written to every step
    index = tl.arange(0, BLOCK_INDEX)
    for start in range(chunk * BLOCK_INDEX, tl.minimum(seq_len, capacity), num_chunks * BLOCK_INDEX):
        column = start + index
        slot = _read_slots(table_row_ptr, column, column < seq_len, row_exists, row_size)
        place = begin[:, None] + column[None, :]
        in_bounds = is_step[:, None] & (column < seq_len)[None, :] & (place < capacity)
        tl.store(kv_indices_ptr + step_row[:, None] + place, slot[None, :], mask=in_bounds)

    # unused tails: all programs share them
    tail = prefix_total + num_branches * (step + 1)
    smallest_tail = prefix_total + num_branches
    first = smallest_tail + (branch * num_chunks + chunk) * BLOCK_INDEX
    for start in range(first, capacity, tl.num_programs(0).to(tl.int64) * num_chunks * BLOCK_INDEX):
        place = start + index
        in_bounds = is_step[:, None] & (place[None, :] >= tail[:, None]) & (place < capacity)[None, :]
        unused = tl.full([BLOCK_STEP, BLOCK_INDEX], -1, tl.int32)
        tl.store(kv_indices_ptr + step_row[:, None] + place[None, :], unused, mask=in_bounds)

    if chunk == 0:
        # draft slots: step s has the branch's draft tokens 0..s
        draft = tl.arange(0, BLOCK_STEP)
        if (PAGE_SIZE == 1) or (TOPK == 1):
            first_column = seq_len + (branch % TOPK) * NUM_STEPS
        else:
            in_page = seq_len % PAGE_SIZE
            pages = (in_page + NUM_STEPS + PAGE_SIZE - 1) // PAGE_SIZE
            first_column = seq_len + (branch % TOPK) * pages * PAGE_SIZE
        slot = _read_slots(table_row_ptr, first_column + draft, draft < NUM_STEPS, row_exists, row_size)
        place = (begin + seq_len)[:, None] + draft[None, :]
        in_bounds = (is_step & is_live)[:, None] & (draft[None, :] <= step[:, None]) & (place < capacity)
        tl.store(kv_indices_ptr + step_row[:, None] + place, slot[None, :], mask=in_bounds)

        # bounds
        bound_row = kv_indptr_ptr + step.to(tl.int64) * (num_branches + 1)
        end = tl.minimum(begin + seq_len + step + 1, capacity)
        tl.store(bound_row + branch + 1, end.to(tl.int32), mask=is_step & is_live)
        if branch == 0:
            tl.store(bound_row, tl.zeros([BLOCK_STEP], tl.int32), mask=is_step)
            needed = prefix_total + num_branches * NUM_STEPS
            overflow = tl.where(needed > capacity, tl.minimum(needed, 2147483647), 0)
            tl.store(overflow_ptr, overflow.to(tl.int32))


def contract(values: dict) -> Output:
    """Checks the arguments of `draft_kv_indices` and describes its outputs."""
    args = check.Arguments("draft_kv_indices", values)
    topk = args.integer("topk", 1)
    num_steps = args.integer("num_steps", 1, MAX_STEPS)
    capacity = args.integer("capacity", 0, 2**31 - 1)
    args.integer("page_size", 1)
    args.tensor("req_pool_indices", ("B",), check.INTEGER)
    args.tensor("req_to_token", ("R", "C"), check.INTEGER, contiguous=1)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    return Output(
        args.spec((num_steps, args.size("B") * topk + 1), torch.int32),
        args.spec((num_steps, capacity), torch.int32),
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
    out: Output | None = None,
) -> Output:
    """Lists the KV slots of every draft step and branch; shapes and layouts are in the module's docstring.

    topk: K, branches a request. num_steps: draft steps, 1..64.
    capacity: room for the indices of one step; K * (sum of seq_lens + B * num_steps) suffices, and `overflow` tells on
    the device when it was less.
    page_size: of the KV pool; it decides where a branch's draft slots are, the indices are token slots all the same.
    """
    contracted = contract(locals())
    out = check.allocate("draft_kv_indices", contracted, out)
    batch_size = seq_lens.shape[0]
    num_rows, row_size = req_to_token.shape
    tuned = dict(tuning.row(TUNING, seq_lens.device))
    num_chunks = max(1, min(tuned.pop("max_chunks"), -(-row_size // tuned["BLOCK_INDEX"])))
    launch(
        "draft_kv_indices",
        _draft_kv_indices_kernel,
        (max(batch_size * topk, 1), num_chunks),
        req_pool_indices_ptr=req_pool_indices,
        req_to_token_ptr=req_to_token,
        seq_lens_ptr=seq_lens,
        kv_indptr_ptr=out.kv_indptr,
        kv_indices_ptr=out.kv_indices,
        overflow_ptr=out.overflow,
        batch_size=batch_size,
        num_rows=num_rows,
        row_size=row_size,
        stride_req_to_token_row=req_to_token.stride(0),
        capacity=capacity,
        TOPK=topk,
        NUM_STEPS=num_steps,
        PAGE_SIZE=page_size,
        BLOCK_STEP=triton.next_power_of_2(num_steps),
        BLOCK_BATCH=128,
        **tuned,
    )
    return out
