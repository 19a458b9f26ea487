"""The KV indices of every request one after another, from its row of req_to_token: the CSR form of a page table.

Computes: The pool slots of the tokens starts[b]..starts[b] + seq_lens[b] - 1 of request b, or with pages of P tokens
    the ids of the pages that hold them, slot // P, from the page of the first token to that of the last.
Invariants: No index is written past `capacity`, and no bound exceeds it; nothing outside the table is read.
Grid: (max(B, 1), chunks) for B requests, one program writes every chunks-th block of one request's indices and its
    share of the unused tail; chunk 0 writes the bound and last_page_len as well.
Launches: 1
Traffic: element size * (number of indices) read, 4 B * (capacity + 2 B + 2) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, check_keep_unused, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.rows import ROW_SIZES, check_listed, check_rows, debug_rows, find_row, read_slots, row_arguments


class Output(NamedTuple):
    """What `kv_indices` returns."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    overflow: torch.Tensor


# Up to max_chunks programs write a request's list, block by block, after each has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_INDEX": 512, "max_chunks": 32, "num_warps": 4}}


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
    rows, seq_lens_ptr, starts_ptr, out,
    num_rows, row_size, stride_req_to_token_row, batch_size, capacity,
    PAGE_SIZE: tl.constexpr, KEEPS_UNUSED: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_INDEX: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    is_live = request < batch_size  # an empty batch has one program, for its bound and tail

    row = find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row)
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
        slot = read_slots(row, column, entry < count)
        if PAGE_SIZE > 1:
            slot = tl.where(slot >= 0, slot // PAGE_SIZE, -1)
        place = begin + entry
        tl.store(out.kv_indices + place, slot, mask=(entry < count) & (place < capacity))
    if not KEEPS_UNUSED:
        part = request * num_chunks + chunk
        fill_unused(out.kv_indices, total, capacity, part, tl.num_programs(0) * num_chunks, -1, BLOCK_INDEX)

    if chunk == 0:
        last_page_len = tl.where(length > 0, (first_token + length - 1) % PAGE_SIZE + 1, 0)
        tl.store(out.kv_indptr + request + 1, tl.minimum(begin + count, capacity).to(tl.int32), mask=is_live)
        tl.store(out.last_page_len + request, last_page_len.to(tl.int32), mask=is_live)
        if request == 0:
            tl.store(out.kv_indptr, 0)
            store_overflow(out.overflow, total, capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("kv_indices", values)
    capacity = check_capacity(args)
    args.integer("page_size", 1)
    check_keep_unused(args)
    check_rows(args)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.tensor("starts", ("B",), check.INTEGER, optional=True)
    lengths, starts = values["seq_lens"], values["starts"]
    page_size = values["page_size"]

    def is_read(column):
        is_first = column % page_size == 0
        return is_first if starts is None else is_first & (column >= (starts // page_size * page_size)[:, None])

    def stop():
        first, count = (
            0 if each is None else each.to(torch.int64).clamp(0, check.MAX_INT32) for each in (starts, lengths)
        )
        return torch.where(lengths > 0, first + count, 0)

    debug_rows(args, ("seq_lens",) if starts is None else ("starts", "seq_lens"), stop, is_read)
    return Output(
        args.spec((args.size("B") + 1,), torch.int32),
        check_listed(args, args.integers((capacity,), 1), stop, is_read, page_size),
        args.spec((args.size("B"),), torch.int32), args.spec((1,), torch.int32),
    )  # fmt: skip


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
    """Lists the slots or pages that every request attends to, one request after another.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int. Pool slot of token t of a row in column t. Rows may be strided. With P > 1 the tokens
            P * i..P * i + P - 1 of a request lie in the P slots of one page, in order; only the first of them is read.
        seq_lens: [B] int. How many tokens each request attends to; negative ones count as 0.
        starts: None or [B] int. First of these tokens; negative ones count as 0. None: 0.
        capacity: room for all indices. (sum of seq_lens) / P + 2 * B is always enough, as is the sum alone.
        page_size: P, tokens of a page. 1 lists slots; more lists the ids of whole pages, slot // P, so attention begins
            at token starts // P * P.
        keep_unused: the unused tail of `out.kv_indices` stays as it is.
        out: four tensors to write into.

    Returns:
        A named tuple:
        kv_indptr: [B + 1] int32. Where each request's entries of `kv_indices` begin and end.
        kv_indices: [capacity] int32, or int64 if `out` holds int64. Slots or page ids, -1 padded; -1 also where the
            table has none.
        last_page_len: [B] int32. Tokens on each request's last page up to its last token, 1..P; 0 if there is none.
        overflow: [1] int32. The room needed if it exceeds `capacity`, where lists and bounds end; else 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative seq_lens, starts and entries, and places outside the table.

    Source:
        SGLang's create_flashinfer_kv_indices, which is given kv_indptr; with last_page_len this is FlashInfer's page
        table.

    Example:
        >>> listed = eagle_kernels.kv_indices(
        ...     torch.tensor([0]), torch.tensor([[8, 9, 10, 11, 4, 5, 6, 7]]), torch.tensor([6]),
        ...     capacity=3, page_size=4)
        >>> listed.kv_indices.tolist()  # slots 8 to 11 are page 2, slots 4 to 7 page 1
        [2, 1, -1]
    """
    out = check.allocate("kv_indices", contract(locals()), out)
    batch_size, row_size = seq_lens.shape[0], req_to_token.shape[1]
    tuned = dict(tuning.row(TUNING, seq_lens.device))
    most_chunks = -(-row_size // (page_size * tuned["BLOCK_INDEX"]))
    launch(
        "kv_indices", _kv_indices_kernel, (max(batch_size, 1), max(1, min(tuned.pop("max_chunks"), most_chunks))),
        seq_lens_ptr=seq_lens, starts_ptr=starts, out=out, **row_arguments(req_pool_indices, req_to_token),
        batch_size=batch_size, capacity=capacity,
        PAGE_SIZE=page_size, KEEPS_UNUSED=keep_unused, **tuned,
    )  # fmt: skip
    return out
