"""Slots and positions of the next tokens of every request, through its page table: where a step writes its keys.

Computes: Token t of request b lies at slot page * page_size + t % page_size, with page = block_table[b, t //
    page_size].
Invariants: Entries outside the table are not read. A token's results depend on its own request alone.
Grid: (B, chunks) for B requests, one program lists BLOCK_TOKEN tokens of one request.
Launches: 1
Traffic: element size * pages of the tokens read, 16 B * B * count written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `find_slots` returns."""

    slots: torch.Tensor
    positions: torch.Tensor


# A program lists BLOCK_TOKEN tokens of one request.
TUNING = {"default": {"BLOCK_TOKEN": 128, "num_warps": 1}}


@triton.jit(do_not_specialize=["max_pages", "stride_block_table_request", "count", "max_length", "page_size"])
def _find_slots_kernel(
    block_table_ptr, first_ptr, out,
    max_pages, stride_block_table_request, count, page_size, max_length,
    BLOCK_TOKEN: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_TOKEN + tl.arange(0, BLOCK_TOKEN)
    in_row = place < count
    token = tl.load(first_ptr + request).to(tl.int64) + place
    index = token // page_size
    is_seen = in_row & (token >= 0) & (index < max_pages)
    page = tl.load(block_table_ptr + request * stride_block_table_request + index, mask=is_seen, other=-1).to(tl.int64)
    slot = tl.where(page >= 0, page * page_size + token % page_size, -1)
    position = token
    if max_length is not None:
        position = tl.minimum(token, max_length - 1)
    tl.store(out.slots + request * count + place, slot, mask=in_row)
    tl.store(out.positions + request * count + place, position, mask=in_row)


def contract(values: dict) -> Output:
    args = check.Arguments("find_slots", values)
    args.tensor("block_table", ("B", "max_pages"), check.INTEGER, contiguous=1)
    args.tensor("first", ("B",), check.INTEGER)
    count = args.integer("count", 0, 1 << 20)
    args.integer("page_size", 1)
    if values["max_length"] is not None:
        args.integer("max_length", 1)
    spec = args.spec((args.size("B"), count), torch.int64)
    return Output(spec, spec)


@launcher
def find_slots(
    block_table: torch.Tensor,
    first: torch.Tensor,
    *,
    count: int,
    page_size: int,
    max_length: int | None = None,
    out: Output | None = None,
) -> Output:
    """Lists slots and positions of `count` tokens of every request, through its page table.

    Args:
        block_table: [B, max_pages] int. Page ids of each request; below 0: no page. Token t is on page t // page_size.
            Rows may be strided. Nothing checks that the pool has these pages.
        first: [B] int. First token of each request that is listed.
        count: tokens listed for every request, 0..2^20.
        page_size: tokens of a page, at least 1.
        max_length: rows of the position table, at least 1: tokens past it are drafts that are never kept, and get its
            last position. None: no limit.
        out: two tensors to write into.

    Returns:
        A named tuple:
        slots: [B, count] int64. page * page_size + t % page_size; -1 for a token below 0 or without a page.
        positions: [B, count] int64. first..first + count - 1, at most max_length - 1; may be negative.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own; page tables are those of vLLM (block_table).

    Example:
        >>> found = eagle_kernels.find_slots(torch.tensor([[7, 2]]), torch.tensor([3]), count=6, page_size=4)
        >>> found.slots.tolist()  # token 3 is the last one on page 7, token 8 is past the page table
        [[31, 8, 9, 10, 11, -1]]
    """
    out = check.allocate("find_slots", contract(locals()), out)
    tuned = tuning.row(TUNING, first.device)
    launch(
        "find_slots", _find_slots_kernel, (first.shape[0], triton.cdiv(count, tuned["BLOCK_TOKEN"])),
        block_table_ptr=block_table, first_ptr=first, out=out, max_pages=block_table.shape[1],
        stride_block_table_request=block_table.stride(0), count=count, page_size=page_size, max_length=max_length,
        **tuned,
    )  # fmt: skip
    return out
