"""Reference of verify_tree_sampled: draws a token at every node, then walks."""

from __future__ import annotations

import torch

from ...sampling import draw_tokens
from ...tree import Output, walk


def verify_tree_sampled(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    spec_steps: int,
) -> Output:
    """See eagle_kernels/ops/verify/verify_tree_sampled.py."""
    batch_size, num_nodes = candidates.shape
    per_node = [
        None if value is None else value.repeat_interleave(num_nodes)
        for value in (seeds, temperature, top_k, top_p, min_p)
    ]
    drawn = draw_tokens(target_logits, positions + 1, *per_node).view(batch_size, num_nodes).tolist()
    return walk(
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        spec_steps,
        token_at=lambda request, node: drawn[request][node],
    )
