"""Walking a token tree by its first-child / next-sibling links."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Output(NamedTuple):
    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


def walk(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    spec_steps: int,
    token_at: Callable[[int, int], int],
    unvisited: torch.Tensor | None = None,
) -> Output:
    """Follows from each root the child that carries `token_at(request, node)`, until none does or S are accepted.

    unvisited: what predicts holds [B * N] at the other nodes; None means -1.
    """
    device = candidates.device
    batch_size, num_nodes = candidates.shape
    predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32)
    if unvisited is not None:
        predicts.copy_(unvisited.view(batch_size, num_nodes))
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32)
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32)
    tokens, retrieved = candidates.tolist(), retrieve_index.tolist()
    first_child, next_sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for request in range(batch_size):
        own = range(request * num_nodes, (request + 1) * num_nodes)
        if retrieved[request][0] not in own:
            continue
        node, accepted = 0, 0
        accept_index[request, 0] = retrieved[request][0]
        while True:
            token = token_at(request, node)
            predicts[request, node] = token
            child = first_child[request][node]
            after = node
            while after < child < num_nodes and retrieved[request][child] in own and tokens[request][child] != token:
                child, after = next_sibling[request][child], child
            is_match = after < child < num_nodes and retrieved[request][child] in own
            if not is_match or token < 0 or accepted == spec_steps:
                break
            node, accepted = child, accepted + 1
            accept_index[request, accepted] = retrieved[request][node]
        accept_token_num[request] = accepted
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))
