"""Reference of extend_cache_locs: one request after another."""

from typing import NamedTuple

import torch

from ...slots import Rows, lengths, packed


class Output(NamedTuple):
    indptr: torch.Tensor
    cache_locs: torch.Tensor
    positions: torch.Tensor
    overflow: torch.Tensor


def extend_cache_locs(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor | None = None,
    *, num_tokens: int | None = None, capacity: int | None = None, keep_unused: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/extend_cache_locs.py; `out` is read for keep_unused, not written."""
    rows, device, first_tokens = Rows(req_pool_indices, req_to_token), starts.device, lengths(starts)
    if num_tokens is not None:
        capacity = len(rows) * num_tokens
        last_tokens = [first + num_tokens for first in first_tokens]
    else:
        last_tokens = lengths(ends)
    tokens = list(map(range, first_tokens, last_tokens))
    counts = list(map(len, tokens))
    unused = (out.cache_locs, out.positions) if keep_unused else (-1, 0)
    read_slots = lambda request, count: rows.slots(request, tokens[request][:count])  # noqa: E731
    indptr, slots, overflow = packed(counts, capacity, read_slots, unused=unused[0])
    _, positions, _ = packed(counts, capacity, lambda request, count: tokens[request][:count], unused=unused[1])
    return Output(*(part.to(device) for part in (indptr, slots, positions, overflow)))
