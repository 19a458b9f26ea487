"""Reference of draft_kv_indices: one step and one branch after another."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...slots import Rows, first_draft_column, lengths, packed


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
    window_size: int = 0,
    sink_size: int = 0,
    window_counts_drafts: bool = False,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """See eagle_kernels/ops/kv/draft_kv_indices.py; `out` is read for keep_unused, not written."""
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    kv_indptr, kv_indices, overflow = [], [], 0
    for step in range(num_steps):
        lists = []
        for request, seq_len in enumerate(lengths(seq_lens)):
            for branch in range(topk):
                first = first_draft_column(seq_len, branch, topk, num_steps, page_size)
                prefix, drafts = list(range(seq_len)), list(range(first, first + step + 1))
                if window_size > 0:
                    seen = len(prefix) + len(drafts) if window_counts_drafts else len(prefix)
                    in_window = range(seen - window_size, seq_len + len(drafts))
                    kept = [place for place in range(seq_len) if place < sink_size or place in in_window]
                    drafts = [column for place, column in enumerate(drafts, seq_len) if place in in_window]
                    prefix = kept
                lists.append(rows.slots(request, prefix + drafts))
        unused = out.kv_indices[step].tolist() if keep_unused else -1
        bounds, entries, overflow = packed(lists, capacity, unused=unused)
        kv_indptr.append(bounds)
        kv_indices.append(entries)
    dtype = out.kv_indices.dtype if keep_unused else torch.int32
    return Output(
        torch.tensor(kv_indptr, dtype=torch.int32, device=device),
        torch.tensor(kv_indices, dtype=dtype, device=device).view(num_steps, capacity),
        torch.tensor([overflow], dtype=torch.int32, device=device),
    )
