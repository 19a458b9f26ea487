"""Reference of draft_kv_indices: one step and one branch after another."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


def draft_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    num_steps: int,
    capacity: int,
    page_size: int = 1,
) -> Output:
    """See eagle_kernels/ops/kv/draft_kv_indices.py."""
    num_rows, row_size = req_to_token.shape
    rows = req_to_token.tolist()
    requests = list(zip(req_pool_indices.tolist(), [max(length, 0) for length in seq_lens.tolist()]))
    kv_indptr = torch.zeros(num_steps, len(requests) * topk + 1, dtype=torch.int32)
    kv_indices = torch.full((num_steps, capacity), -1, dtype=torch.int32)
    needed = 0
    for step in range(num_steps):
        indices: list[int] = []
        bounds = [0]
        for row, seq_len in requests:
            for branch in range(topk):
                first = _first_draft_column(seq_len, branch, topk, num_steps, page_size)
                columns = [*range(seq_len), *range(first, first + step + 1)]
                exists = 0 <= row < num_rows
                indices += [rows[row][column] if exists and column < row_size else -1 for column in columns]
                bounds.append(min(len(indices), capacity))
        kv_indptr[step] = torch.tensor(bounds, dtype=torch.int32)
        kept = indices[:capacity]
        kv_indices[step, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        needed = len(indices)
    overflow = torch.tensor([needed if needed > capacity else 0], dtype=torch.int32)
    device = seq_lens.device
    return Output(kv_indptr.to(device), kv_indices.to(device), overflow.to(device))


def _first_draft_column(seq_len: int, branch: int, topk: int, num_steps: int, page_size: int) -> int:
    """Branches lie one after another; with pages and several branches, each starts on pages of its own."""
    if page_size == 1 or topk == 1:
        return seq_len + branch * num_steps
    in_page = seq_len % page_size
    pages = -(-(in_page + num_steps) // page_size)
    return seq_len // page_size * page_size + branch * pages * page_size + in_page
