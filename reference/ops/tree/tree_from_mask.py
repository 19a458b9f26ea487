"""Reference of tree_from_mask: one node after another, from the bits left of the diagonal."""

from typing import NamedTuple

import torch

from ...tree import links_of
from ...tree_mask import read_mask


class Output(NamedTuple):
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor


def tree_from_mask(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor, *, num_verify_tokens: int, tree_mask_mode: str = "packed"
) -> Output:
    """See eagle_kernels/ops/tree/tree_from_mask.py."""
    device, batch_size, num_nodes = seq_lens.device, len(seq_lens), num_verify_tokens
    visible = read_mask(tree_mask, seq_lens, num_nodes, tree_mask_mode).tolist()
    num_ancestors = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device="cpu")
    next_token = torch.full((batch_size, num_nodes), -1, device="cpu")
    parent_of = [[-1] * num_nodes for _ in range(batch_size)]
    for request in range(batch_size):
        for node in range(num_nodes):
            ancestors = [other for other in range(node) if visible[request][node][other]]
            num_ancestors[request, node] = len(ancestors)
            for other in ancestors:
                if next_token[request, other] < 0:
                    next_token[request, other] = node
            parent_of[request][node] = max(ancestors, default=-1)
    return Output(
        positions=(seq_lens.to(torch.int64)[:, None] + num_ancestors.to(device)).flatten(),
        retrieve_index=torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes),
        retrieve_next_token=next_token.to(device),
        retrieve_next_sibling=links_of(parent_of, num_nodes)[1].to(device),
    )
