"""Reference of chain_kv_indices: one token of one chain after another."""

from typing import NamedTuple

import torch

from ...slots import Rows, lengths, packed


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


def chain_kv_indices(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, kv_lens: torch.Tensor,
    *, num_verify_tokens: int, capacity: int, keep_unused: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/chain_kv_indices.py; `out` gives the dtype and what keep_unused keeps."""
    dtype = torch.int32 if out is None else out.kv_indices.dtype
    rows, device = Rows(req_pool_indices, req_to_token), kv_lens.device
    first_count = torch.tensor(lengths(kv_lens), dtype=torch.int64, device=device)[:, None] - num_verify_tokens + 1
    counts = (first_count + torch.arange(num_verify_tokens, device=device)).clamp(min=0).flatten()
    read = lambda row, count: rows.slots(row // num_verify_tokens, range(count))  # noqa: E731
    lists = packed(counts, capacity, read, unused=out.kv_indices if keep_unused else -1, dtype=dtype)
    return Output(*(part.to(device) for part in lists))
