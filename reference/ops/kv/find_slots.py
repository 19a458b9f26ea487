"""Reference of find_slots: one gather from the page table."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    slots: torch.Tensor
    positions: torch.Tensor


def find_slots(
    block_table: torch.Tensor, first: torch.Tensor, *, count: int, page_size: int, max_length: int | None = None
) -> Output:
    """See eagle_kernels/ops/kv/find_slots.py."""
    tokens = first.to(torch.int64)[:, None] + torch.arange(count, device=first.device)
    max_pages = block_table.shape[1]
    page_index = tokens // page_size
    has_entry = (tokens >= 0) & (page_index < max_pages)
    # a column of its own for the tokens without an entry
    table = torch.nn.functional.pad(block_table.to(torch.int64), (0, 1), value=-1)
    page = table.gather(1, torch.where(has_entry, page_index, max_pages))
    slots = torch.where(page >= 0, page * page_size + tokens % page_size, -1)
    return Output(slots, tokens if max_length is None else tokens.clamp(max=max_length - 1))
