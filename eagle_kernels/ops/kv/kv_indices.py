"""The KV indices of every request one after another, from its row of req_to_token: the CSR form of a page table.

Computes
    Request b attends to the tokens starts[b] .. starts[b] + seq_lens[b] - 1. Its indices are their pool slots
    (SGLang's create_flashinfer_kv_indices), or with pages the ids of the pages that hold them, slot // P, as
    `gqa_decode`, FlashInfer and SGLang read them: from the page of the first token to that of the last. A page is
    listed whole, so with pages the attention begins at starts[b] // P * P.
Shapes
    req_pool_indices  [B]          int    the request's row of req_to_token
    req_to_token      [R, C]       int    the pool slot of every token; rows may be strided
    seq_lens          [B]          int    tokens to attend to
    starts            [B]          int    the first of them; None: 0
    capacity          int                 room for all indices
    page_size         int                 P; with pages the tokens of one lie in consecutive slots, as every paged pool
                                          lays them
    -> kv_indptr      [B + 1]      int32  where a request's indices start, limited to capacity
    -> kv_indices     [capacity]   int32  slots or page ids, -1 in the unused tail; int64 if `out` is
    -> last_page_len  [B]          int32  tokens in a request's last page, 1..P; 0 for a request without tokens
    -> overflow       [1]          int32  the room that was needed if it exceeds capacity, else 0
Invariants
    Every output is written whole, except the unused tail with keep_unused. Indices past `capacity` are not written,
    and no bound exceeds it. Columns past C and rows outside 0..R - 1 are not read; their entries are -1. Negative
    lengths and starts count as 0.
Grid
    (max(B, 1), chunks), one program writes every chunks-th block of one request's indices and its share of the unused
    tail; chunk 0 writes the bound and last_page_len as well.
Launches
    1
Traffic
    element size * (number of indices) read, 4 B * (capacity + 2 B + 2) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, check_keep_unused, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.rows import ROW_SIZES, check_rows, find_row, read_slots, row_arguments


class Output(NamedTuple):
    """What `kv_indices` returns."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    overflow: torch.Tensor


TUNING = {"default": {"BLOCK_INDEX": 512, "max_chunks": 32, "num_warps": 4}}


@triton.jit
def _read_span(seq_lens_ptr, starts_ptr, request, is_live, PAGE_SIZE: tl.constexpr):
    """Returns (first token, tokens, indices) of one or several requests."""
    length = read_lengths(seq_lens_ptr, request, is_live)
    start = tl.zeros_like(length)
    if starts_ptr is not None:
        start = read_lengths(starts_ptr, request, is_live)
    count = (start % PAGE_SIZE + length + PAGE_SIZE - 1) // PAGE_SIZE
    return start, length, tl.where(length > 0, count, 0)


@triton.jit(do_not_specialize=[*ROW_SIZES, "batch_size", "capacity"])
def _kv_indices_kernel(
    # inputs
    req_pool_indices_ptr,
    req_to_token_ptr,
    seq_lens_ptr,
    starts_ptr,
    # outputs
    kv_indptr_ptr,
    kv_indices_ptr,
    last_page_len_ptr,
    overflow_ptr,
    # sizes
    num_rows,
    row_size,
    stride_req_to_token_row,
    batch_size,
    capacity,
    PAGE_SIZE: tl.constexpr,
    KEEPS_UNUSED: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_INDEX: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    is_live = request < batch_size  # an empty batch has one program, for its bound and tail

    row_ptr, row_exists = find_row(
        req_pool_indices_ptr, req_to_token_ptr, request, is_live, num_rows, stride_req_to_token_row
    )
    first_token, length, count = _read_span(seq_lens_ptr, starts_ptr, request, is_live, PAGE_SIZE)
    sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
    sum_total = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        _, _, counts = _read_span(seq_lens_ptr, starts_ptr, other, other < batch_size, PAGE_SIZE)
        sum_before += tl.where(other < request, counts, 0)
        sum_total += counts
    begin = tl.sum(sum_before)
    total = tl.sum(sum_total)

    index = tl.arange(0, BLOCK_INDEX)
    for start in range(chunk * BLOCK_INDEX, tl.minimum(count, capacity), num_chunks * BLOCK_INDEX):
        entry = start + index
        column = (first_token // PAGE_SIZE + entry) * PAGE_SIZE
        slot = read_slots(row_ptr, column, entry < count, row_exists, row_size)
        if PAGE_SIZE > 1:
            slot = tl.where(slot >= 0, slot // PAGE_SIZE, -1)
        place = begin + entry
        tl.store(kv_indices_ptr + place, slot, mask=(entry < count) & (place < capacity))
    if not KEEPS_UNUSED:
        part = request * num_chunks + chunk
        fill_unused(kv_indices_ptr, total, capacity, part, tl.num_programs(0) * num_chunks, -1, BLOCK_INDEX)

    if chunk == 0:
        last_page_len = tl.where(length > 0, (first_token + length - 1) % PAGE_SIZE + 1, 0)
        tl.store(kv_indptr_ptr + request + 1, tl.minimum(begin + count, capacity).to(tl.int32), mask=is_live)
        tl.store(last_page_len_ptr + request, last_page_len.to(tl.int32), mask=is_live)
        if request == 0:
            tl.store(kv_indptr_ptr, 0)
            store_overflow(overflow_ptr, total, capacity)


def contract(values: dict) -> Output:
    """Checks the arguments of `kv_indices` and describes its outputs."""
    args = check.Arguments("kv_indices", values)
    capacity = check_capacity(args)
    args.integer("page_size", 1)
    check_keep_unused(args)
    check_rows(args)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.tensor("starts", ("B",), check.INTEGER, optional=True)
    return Output(
        args.spec((args.size("B") + 1,), torch.int32),
        args.integers((capacity,), 1),
        args.spec((args.size("B"),), torch.int32),
        args.spec((1,), torch.int32),
    )


@launcher
def kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    capacity: int,
    page_size: int = 1,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists the slots or pages that every request attends to; shapes and layouts are in the module's docstring.

    capacity: room for all indices; the sum of seq_lens suffices, with pages (sum of seq_lens) / P + 2 B, and `overflow`
    says on the device when it was less.
    page_size: P > 1 lists page ids, 1 slots.
    keep_unused: with `out` only, what comes after the indices stays as it is instead of -1.
    """
    contracted = contract(locals())
    out = check.allocate("kv_indices", contracted, out)
    batch_size, row_size = seq_lens.shape[0], req_to_token.shape[1]
    tuned = dict(tuning.row(TUNING, seq_lens.device))
    most_chunks = -(-row_size // (page_size * tuned["BLOCK_INDEX"]))
    launch(
        "kv_indices",
        _kv_indices_kernel,
        (max(batch_size, 1), max(1, min(tuned.pop("max_chunks"), most_chunks))),
        seq_lens_ptr=seq_lens,
        starts_ptr=starts,
        kv_indptr_ptr=out.kv_indptr,
        kv_indices_ptr=out.kv_indices,
        last_page_len_ptr=out.last_page_len,
        overflow_ptr=out.overflow,
        **row_arguments(req_pool_indices, req_to_token),
        batch_size=batch_size,
        capacity=capacity,
        PAGE_SIZE=page_size,
        KEEPS_UNUSED=keep_unused,
        BLOCK_BATCH=128,
        **tuned,
    )
    return out
