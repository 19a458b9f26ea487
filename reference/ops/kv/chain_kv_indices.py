"""Reference of chain_kv_indices: one token of one chain after another."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...slots import Rows, lengths, packed


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


def chain_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    num_verify_tokens: int,
    capacity: int,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """See eagle_kernels/ops/kv/chain_kv_indices.py; `out` is read for keep_unused, not written."""
    rows, device = Rows(req_pool_indices, req_to_token), kv_lens.device
    lists = [
        rows.slots(request, range(kv_len - num_verify_tokens + 1 + token))
        for request, kv_len in enumerate(lengths(kv_lens))
        for token in range(num_verify_tokens)
    ]
    unused = out.kv_indices.tolist() if keep_unused else -1
    kv_indptr, entries, overflow = packed(lists, capacity, unused=unused)
    return Output(
        torch.tensor(kv_indptr, dtype=torch.int32, device=device),
        torch.tensor(entries, dtype=out.kv_indices.dtype if keep_unused else torch.int32, device=device),
        torch.tensor([overflow], dtype=torch.int32, device=device),
    )
