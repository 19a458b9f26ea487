"""Reference of draft_kv_indices: one step and one branch after another."""

from itertools import chain, islice
from typing import NamedTuple

import torch

from ...slots import Rows, first_draft_column, lengths, packed


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


def draft_kv_indices(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor,
    *, topk: int, num_steps: int, capacity: int, page_size: int = 1, window_size: int = 0, sink_size: int = 0,
    window_counts_drafts: bool = False, keep_unused: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/draft_kv_indices.py; `out` gives the dtype and what keep_unused keeps."""
    dtype = torch.int32 if out is None else out.kv_indices.dtype
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    kv_indptr, kv_indices = [], []
    for step in range(num_steps):
        lists = []  # (request, the parts of a branch's columns)
        for request, seq_len in enumerate(lengths(seq_lens)):
            for branch in range(topk):
                first = first_draft_column(seq_len, branch, topk, num_steps, page_size)
                parts = [range(seq_len), range(first, first + step + 1)]
                if window_size > 0:
                    seen = seq_len + step + 1 if window_counts_drafts else seq_len
                    begin = max(seen - window_size, 0)  # of the window, in prefix and drafts together
                    sinks = range(min(sink_size, begin, seq_len))
                    parts = [sinks, range(begin, seq_len), range(first + max(begin - seq_len, 0), first + step + 1)]
                lists.append((request, parts))

        def read(index: int, count: int, lists=lists) -> list[int]:
            request, parts = lists[index]
            return rows.slots(request, islice(chain(*parts), count))

        counts = [sum(map(len, parts)) for _, parts in lists]
        unused = out.kv_indices[step] if keep_unused else -1
        bounds, entries, overflow = packed(counts, capacity, read, unused=unused, dtype=dtype)
        kv_indptr.append(bounds)
        kv_indices.append(entries)
    return Output(torch.stack(kv_indptr).to(device), torch.stack(kv_indices).to(device), overflow.to(device))
