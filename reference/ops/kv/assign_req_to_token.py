"""Reference of assign_req_to_token: the slots of one request after another."""

import torch

from ...slots import lengths


def assign_req_to_token(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:  # fmt: skip
    """See eagle_kernels/ops/kv/assign_req_to_token.py."""
    num_rows, row_size = req_to_token.shape
    slots, taken = cache_locs.tolist(), 0
    for row, first, last in zip(req_pool_indices.tolist(), lengths(starts), lengths(ends)):
        if 0 <= row < num_rows:
            for column, slot in zip(range(first, min(last, row_size)), slots[taken:]):
                req_to_token[row, column] = slot
        taken += max(last - first, 0)
