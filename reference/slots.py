"""Rows of req_to_token, and lists of what stands in them, one request after another."""

from collections.abc import Callable

import torch

LARGEST = 2**31 - 1


def lengths(tensor: torch.Tensor) -> list[int]:
    """Returns lengths, or places in a row: 0 at least."""
    return [min(max(length, 0), LARGEST) for length in tensor.tolist()]


class Rows:
    """The rows of req_to_token that belong to the requests of a batch."""

    def __init__(self, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor):
        self._table = req_to_token.tolist()
        self._row_of = req_pool_indices.tolist()

    def __len__(self) -> int:
        return len(self._row_of)

    def slots(self, request: int, columns) -> list[int]:
        """Returns the slots in these columns of a request's row, -1 where there are none."""
        row_index = self._row_of[request]
        row = self._table[row_index] if 0 <= row_index < len(self._table) else []
        return [max(row[column], -1) if 0 <= column < len(row) else -1 for column in columns]


def packed(
    counts, capacity: int, read: Callable[[int, int], list[int]], *, unused: int | torch.Tensor = -1, dtype=torch.int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (bounds, entries, overflow [1]): lists one after another, cut at `capacity`.
    counts: how many entries each list has, as a list or a tensor. read(index, count) gives the first entries of a list,
    at most those that have room. unused: a number, or a tensor whose entries stay where no list reaches."""
    counts = torch.as_tensor(counts, dtype=torch.int64, device="cpu")
    needed = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    bounds = needed.clamp(max=capacity)
    entries = torch.full((capacity,), unused, dtype=dtype, device="cpu") if isinstance(unused, int) else unused.clone()
    for index in bounds.diff().nonzero().flatten().tolist():
        first, last = bounds[index : index + 2].tolist()
        entries[first:last] = torch.tensor(read(index, last - first), dtype=entries.dtype, device="cpu")
    total = int(needed[-1])
    overflow = min(total, LARGEST) if total > capacity else 0
    return bounds.to(torch.int32), entries, torch.tensor([overflow], dtype=torch.int32, device="cpu")


def first_draft_column(seq_len: int, branch: int, topk: int, num_steps: int, page_size: int) -> int:
    """Branches lie one after another; with pages and several branches, each starts on pages of its own."""
    if page_size == 1 or topk == 1:
        return seq_len + branch * num_steps
    in_page = seq_len % page_size
    pages = -(-(in_page + num_steps) // page_size)
    return seq_len // page_size * page_size + branch * pages * page_size + in_page
