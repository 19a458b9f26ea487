"""Reference of tree_from_mask: one node after another, from the bits left of the diagonal."""

from __future__ import annotations

from typing import NamedTuple

import torch

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
    next_sibling = torch.full((batch_size, num_nodes), -1, device="cpu")
    for request in range(batch_size):
        last_child: dict[int, int] = {}
        for node in range(num_nodes):
            ancestors = [other for other in range(node) if visible[request][node][other]]
            num_ancestors[request, node] = len(ancestors)
            for other in ancestors:
                if next_token[request, other] < 0:
                    next_token[request, other] = node
            if ancestors:
                parent = ancestors[-1]
                if parent in last_child:
                    next_sibling[request, last_child[parent]] = node
                last_child[parent] = node
    return Output(
        positions=(seq_lens.to(torch.int64)[:, None] + num_ancestors.to(device)).flatten(),
        retrieve_index=torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes),
        retrieve_next_token=next_token.to(device),
        retrieve_next_sibling=next_sibling.to(device),
    )
