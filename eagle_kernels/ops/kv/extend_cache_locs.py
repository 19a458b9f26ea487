"""Slots and positions of a range of every request's tokens, packed: the inverse of `assign_req_to_token`.

Computes: The slots of the tokens starts[b]..ends[b] - 1 of request b, those of all requests one after another, and the
    tokens' positions with them.
Invariants: No entry is written past `capacity`, and no bound exceeds it; nothing outside the table is read.
Grid: (max(B, 1), chunks) for B requests, one program writes every chunks-th block of one request's range and its share
    of the unused tail; chunk 0 writes the bound as well.
Launches: 1
Traffic: element size * (number of slots) read, 16 B * capacity + 4 B * (B + 2) written.
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
    """What `extend_cache_locs` returns."""

    indptr: torch.Tensor
    cache_locs: torch.Tensor
    positions: torch.Tensor
    overflow: torch.Tensor


# Up to max_chunks programs write a request's list, block by block, after each has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_SLOT": 256, "max_chunks": 32, "num_warps": 4}}


@triton.jit(do_not_specialize=[*ROW_SIZES, "batch_size", "num_tokens", "capacity"])
def _extend_cache_locs_kernel(
    rows, starts_ptr, ends_ptr, out,
    num_rows, row_size, stride_req_to_token_row, batch_size, num_tokens, capacity,
    KEEPS_UNUSED: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_SLOT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    is_live = request < batch_size  # an empty batch has one program, for its bound and tail

    row = find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row)
    first = read_lengths(starts_ptr, request, is_live)
    if ends_ptr is None:
        count = tl.where(is_live, num_tokens, 0).to(tl.int64)
        begin = request * num_tokens
        total = batch_size.to(tl.int64) * num_tokens
    else:
        count = tl.maximum(read_lengths(ends_ptr, request, is_live) - first, 0)
        sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
        sum_total = tl.zeros([BLOCK_BATCH], tl.int64)
        for start in range(0, batch_size, BLOCK_BATCH):
            other = start + tl.arange(0, BLOCK_BATCH)
            is_other = other < batch_size
            counts = read_lengths(ends_ptr, other, is_other) - read_lengths(starts_ptr, other, is_other)
            counts = tl.maximum(counts, 0)
            sum_before += tl.where(other < request, counts, 0)
            sum_total += counts
        begin = tl.sum(sum_before)
        total = tl.sum(sum_total)

    slots = tl.arange(0, BLOCK_SLOT)
    for start in range(chunk * BLOCK_SLOT, tl.minimum(count, capacity), num_chunks * BLOCK_SLOT):
        entry = start + slots
        slot = read_slots(row, first + entry, entry < count)
        place = begin + entry
        in_bounds = (entry < count) & (place < capacity)
        tl.store(out.cache_locs + place, slot, mask=in_bounds)
        tl.store(out.positions + place, first + entry, mask=in_bounds)
    if not KEEPS_UNUSED:
        part = request * num_chunks + chunk
        num_parts = tl.num_programs(0) * num_chunks
        fill_unused(out.cache_locs, total, capacity, part, num_parts, -1, BLOCK_SLOT)
        fill_unused(out.positions, total, capacity, part, num_parts, 0, BLOCK_SLOT)

    if chunk == 0:
        tl.store(out.indptr + request + 1, tl.minimum(begin + count, capacity).to(tl.int32), mask=is_live)
        if request == 0:
            tl.store(out.indptr, 0)
            store_overflow(out.overflow, total, capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("extend_cache_locs", values)
    check_keep_unused(args)
    check_rows(args)
    args.tensor("starts", ("B",), check.INTEGER)
    if args.exactly_one("ends", "num_tokens") == "ends":
        args.tensor("ends", ("B",), check.INTEGER)
        capacity = check_capacity(args)
    else:
        if values["capacity"] is not None:
            args.fail("capacity", "not be given with num_tokens, from which it follows", values["capacity"])
        capacity = args.size("B") * args.integer("num_tokens", 0, check.MAX_INT32)
    starts, ends = values["starts"], values["ends"]

    def stop():
        first = starts.to(torch.int64).clamp(max=check.MAX_INT32)
        end = first + values["num_tokens"] if ends is None else ends
        return torch.where(end > first, end, 0)

    names = ("starts",) if ends is None else ("starts", "ends")
    is_read = lambda column: column >= starts[:, None]  # noqa: E731
    debug_rows(args, names, stop, is_read)
    return Output(
        args.spec((args.size("B") + 1,), torch.int32),
        check_listed(args, args.integers((capacity,), 1, default=torch.int64), stop, is_read),
        args.integers((capacity,), 2, default=torch.int64), args.spec((1,), torch.int32),
    )  # fmt: skip


@launcher
def extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor | None = None,
    *,
    num_tokens: int | None = None,
    capacity: int | None = None,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists slots and positions of a range of every request's tokens, one request after another.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int. Pool slot of token t of a row in column t. Rows may be strided.
        starts: [B] int. First token of each range; negative ones count as 0.
        ends: None or [B] int. One past the last token of each range; a range that ends before it starts is empty.
        num_tokens: instead of `ends`: tokens of every range, at least 0.
        capacity: room for all ranges, with `ends` only; the sum of their lengths is enough. With `num_tokens` it is
            num_tokens * B.
        keep_unused: unused tails of the lists in `out` stay as they are.
        out: four tensors to write into.

    Returns:
        A named tuple, whose int64 is int32 where `out` holds int32:
        indptr: [B + 1] int32. Where each request's entries of the next two lists begin and end.
        cache_locs: [capacity] int64. Pool slots, -1 padded; -1 also where the table has none.
        positions: [capacity] int64. Positions of the tokens; 0 in the unused tail, which is valid in any table.
        overflow: [1] int32. The room needed if it exceeds `capacity`, where lists and bounds end; else 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative starts, ends and entries, and places outside the table.

    Source:
        SGLang's assign_extend_cache_locs and, for `num_tokens`, its uniform variant.

    Example:
        >>> listed = eagle_kernels.extend_cache_locs(
        ...     torch.tensor([1, 0]), torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]), torch.tensor([2, 0]),
        ...     num_tokens=2)
        >>> listed.cache_locs.tolist(), listed.positions.tolist()  # tokens 2 and 3 of row 1, then 0 and 1 of row 0
        ([22, 23, 10, 11], [2, 3, 0, 1])
    """
    out = check.allocate("extend_cache_locs", contract(locals()), out)
    batch_size, capacity = starts.shape[0], out.cache_locs.shape[0]
    tuned = dict(tuning.row(TUNING, starts.device))
    longest = min(req_to_token.shape[1], capacity) if num_tokens is None else num_tokens
    num_chunks = max(1, min(tuned.pop("max_chunks"), -(-longest // tuned["BLOCK_SLOT"])))
    launch(
        "extend_cache_locs", _extend_cache_locs_kernel, (max(batch_size, 1), num_chunks),
        starts_ptr=starts, ends_ptr=ends, out=out, **row_arguments(req_pool_indices, req_to_token),
        batch_size=batch_size, num_tokens=0 if num_tokens is None else num_tokens, capacity=capacity,
        KEEPS_UNUSED=keep_unused, **tuned,
    )  # fmt: skip
    return out
