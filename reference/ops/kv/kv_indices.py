"""Reference of kv_indices: one request after another."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...slots import Rows, lengths, packed


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    overflow: torch.Tensor


def kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    capacity: int,
    page_size: int = 1,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """See eagle_kernels/ops/kv/kv_indices.py; `out` is read for keep_unused, not written."""
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    first_tokens = [0] * len(rows) if starts is None else lengths(starts)
    lists, last_page_len = [], []
    for request, (first, length) in enumerate(zip(first_tokens, lengths(seq_lens))):
        pages = sorted({token // page_size for token in range(first, first + length)})
        slots = rows.slots(request, [page * page_size for page in pages])
        lists.append([slot // page_size for slot in slots])  # rounded down: -1 stays -1
        last_page_len.append(first + length - pages[-1] * page_size if pages else 0)
    unused = out.kv_indices.tolist() if keep_unused else -1
    kv_indptr, entries, overflow = packed(lists, capacity, unused=unused)
    return Output(
        torch.tensor(kv_indptr, dtype=torch.int32, device=device),
        torch.tensor(entries, dtype=out.kv_indices.dtype if keep_unused else torch.int32, device=device),
        torch.tensor(last_page_len, dtype=torch.int32, device=device),
        torch.tensor([overflow], dtype=torch.int32, device=device),
    )
