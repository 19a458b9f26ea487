"""Reference of draft_cache_locs: one branch after another."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...slots import Rows, first_draft_column, lengths, packed


class Output(NamedTuple):
    cache_locs: torch.Tensor
    positions: torch.Tensor
    copy_indptr: torch.Tensor
    source_locs: torch.Tensor
    target_locs: torch.Tensor
    overflow: torch.Tensor


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
) -> Output:
    """See eagle_kernels/ops/kv/draft_cache_locs.py."""
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    if capacity is None:
        capacity = len(rows) * (topk - 1) * (page_size - 1)
    cache_locs, positions, sources, targets = [], [], [], []
    for request, seq_len in enumerate(lengths(seq_lens)):
        copies = []
        for branch in range(topk):
            first = first_draft_column(seq_len, branch, topk, num_steps, page_size)
            cache_locs.append(rows.slots(request, range(first, first + num_steps)))
            positions.append(seq_len)
            if branch > 0 and page_size > 1:
                in_page = seq_len % page_size
                source = rows.slots(request, range(seq_len - in_page, seq_len))
                target = rows.slots(request, range(first - in_page, first))
                copies += [pair if -1 not in pair else (-1, -1) for pair in zip(source, target)]
        sources.append([source for source, _ in copies])
        targets.append([target for _, target in copies])
    copy_indptr, sources, overflow = packed(sources, capacity)
    _, targets, _ = packed(targets, capacity)
    locs = torch.tensor(cache_locs, dtype=torch.int64, device=device).view(len(rows) * topk, num_steps)
    return Output(
        locs.t().contiguous() if is_step_major else locs,
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(copy_indptr, dtype=torch.int32, device=device),
        torch.tensor(sources, dtype=torch.int64, device=device),
        torch.tensor(targets, dtype=torch.int64, device=device),
        torch.tensor([overflow], dtype=torch.int32, device=device),
    )
