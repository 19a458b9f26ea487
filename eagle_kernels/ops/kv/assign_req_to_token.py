"""Writes newly allocated slots into the rows of req_to_token, in place: the inverse of `extend_cache_locs`.

Computes: Tokens starts[b]..ends[b] - 1 of request b get the next ends[b] - starts[b] slots of cache_locs.
Invariants: Nothing outside the columns starts..ends - 1 of the requests' rows is written.
Grid: (B, chunks) for B requests, one program writes every chunks-th block of one request's range.
Launches: 1
Traffic: per slot its element size read from cache_locs and that of req_to_token written.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import read_lengths
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.rows import ROW_SIZES, check_rows, debug_rows, find_row, row_arguments

MUTATES = ("req_to_token",)

# Up to max_chunks programs write a request's list, block by block, after each has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_SLOT": 256, "max_chunks": 32, "num_warps": 4}}


@triton.jit(do_not_specialize=[*ROW_SIZES, "num_slots"])
def _assign_req_to_token_kernel(
    rows, starts_ptr, ends_ptr, cache_locs_ptr,
    num_rows, row_size, stride_req_to_token_row, num_slots,
    BLOCK_BATCH: tl.constexpr, BLOCK_SLOT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    row = find_row(rows, request, True, num_rows, row_size, stride_req_to_token_row)
    first = read_lengths(starts_ptr, request, True)
    last = read_lengths(ends_ptr, request, True)
    sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, request, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        is_before = other < request
        counts = read_lengths(ends_ptr, other, is_before) - read_lengths(starts_ptr, other, is_before)
        sum_before += tl.maximum(counts, 0)
    begin = tl.sum(sum_before)

    # no more slots than fit into the row, and no more than there are
    stop = tl.minimum(tl.minimum(last, row_size) - first, num_slots)
    slots = tl.arange(0, BLOCK_SLOT)
    for start in range(tl.program_id(1) * BLOCK_SLOT, stop, tl.num_programs(1) * BLOCK_SLOT):
        entry = start + slots
        is_slot = row.exists & (entry < stop) & (begin + entry < num_slots)
        slot = tl.load(cache_locs_ptr + begin + entry, mask=is_slot)
        tl.store(row.ptr + first + entry, slot, mask=is_slot)


def contract(values: dict) -> None:
    args = check.Arguments("assign_req_to_token", values)
    check_rows(args)
    args.tensor("starts", ("B",), check.INTEGER)
    args.tensor("ends", ("B",), check.INTEGER)
    args.tensor("cache_locs", (None,), check.INTEGER)
    starts, ends, slots = (values[name] for name in ("starts", "ends", "cache_locs"))
    num_columns = args.size("C")
    for name in ("starts", "ends"):
        lie_within = lambda name=name: (values[name] >= 0) & (values[name] <= num_columns)  # noqa: E731
        args.debug(name, f"lie in 0..{num_columns}, the columns of req_to_token", lie_within)
    debug_rows(args, (), lambda: torch.where(ends > starts, ends, 0))
    if slots.dtype == torch.int64 and values["req_to_token"].dtype == torch.int32:
        are_held = lambda: abs(slots.clamp(min=-(2**62))) <= check.MAX_INT32  # noqa: E731
        args.debug("cache_locs", "fit in req_to_token, which is int32", are_held, of_reference=True)
    are_given = lambda: (ends - starts).clamp(min=0).cumsum(0) <= len(slots)  # noqa: E731
    args.debug("ends", f"ask for at most {len(slots)} slots", are_given)


@launcher
def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:
    """Writes the slots of each request's tokens starts..ends - 1 into its row of `req_to_token`, in place.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int, in place. Pool slot of token t of a row in column t. Rows may be strided.
        starts: [B] int. First token of each request that gets a slot; negative ones count as 0.
        ends: [B] int. One past the last token that gets a slot; a range that ends before it starts is empty.
        cache_locs: [T] int. Slots of all requests, one request after another.

    Returns:
        None. Slots for places outside the table are skipped, and a column for which `cache_locs` is too short keeps its
        value. Nothing checks that requests write different columns.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses starts and ends outside 0..C, rows outside the table, and `cache_locs`
        without a slot for every column.

    Source:
        SGLang's assign_req_to_token_pool.

    Example:
        >>> req_to_token = torch.full((2, 4), -1)
        >>> eagle_kernels.assign_req_to_token(
        ...     torch.tensor([1, 0]), req_to_token, torch.tensor([0, 2]), torch.tensor([2, 3]),
        ...     torch.tensor([70, 71, 72]))
        >>> req_to_token.tolist()  # tokens 0 and 1 of the first request, which has row 1; token 2 of the other
        [[-1, -1, 72, -1], [70, 71, -1, -1]]
    """
    contract(locals())
    num_slots = cache_locs.shape[0]
    tuned = dict(tuning.row(TUNING, req_to_token.device))
    num_chunks = max(1, min(tuned.pop("max_chunks"), -(-num_slots // tuned["BLOCK_SLOT"])))
    launch(
        "assign_req_to_token", _assign_req_to_token_kernel, (req_pool_indices.shape[0], num_chunks),
        starts_ptr=starts, ends_ptr=ends, cache_locs_ptr=cache_locs, **row_arguments(req_pool_indices, req_to_token),
        num_slots=num_slots, **tuned,
    )  # fmt: skip
