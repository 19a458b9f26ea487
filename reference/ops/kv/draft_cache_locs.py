"""Reference of draft_cache_locs: one branch after another."""

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
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor,
    *, topk: int, num_steps: int, page_size: int = 1, capacity: int | None = None, is_step_major: bool = False,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/draft_cache_locs.py."""
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    if capacity is None:
        capacity = len(rows) * (topk - 1) * (page_size - 1)
    cache_locs, positions, counts, copies = [], [], [], []
    for request, seq_len in enumerate(lengths(seq_lens)):
        for branch in range(topk):
            first = first_draft_column(seq_len, branch, topk, num_steps, page_size)
            cache_locs.append(rows.slots(request, range(first, first + num_steps)))
            positions.append(seq_len)
            if branch > 0 and page_size > 1:
                counts.append(seq_len % page_size)
                copies.append((request, range(seq_len - counts[-1], seq_len), range(first - counts[-1], first)))

    def read(index: int, count: int, side: int) -> list[int]:
        request, *columns = copies[index]
        pairs = zip(*(rows.slots(request, of_side[:count]) for of_side in columns))
        return [-1 if -1 in pair else pair[side] for pair in pairs]

    bounds, sources, overflow = packed(counts, capacity, lambda index, count: read(index, count, 0))
    _, targets, _ = packed(counts, capacity, lambda index, count: read(index, count, 1))
    copy_indptr = bounds[:: topk - 1].contiguous() if copies else bounds.new_zeros(len(rows) + 1)
    locs = torch.tensor(cache_locs, dtype=torch.int64, device=device).view(len(rows) * topk, num_steps)
    return Output(
        locs.t().contiguous() if is_step_major else locs,
        torch.tensor(positions, dtype=torch.int64, device=device),
        *(part.to(device) for part in (copy_indptr, sources, targets, overflow)),
    )
