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
    any_order: bool = False,
    most_accepted: int | None = None,
) -> Output:
    """Follows from each root the child that carries `token_at(request, node)`, until none does or S are accepted.

    most_accepted: the limit, if not S.
    unvisited: predicts [B * N] off the path; None: -1.
    any_order: links may point to any node but the root; one to a node met before ends the walk.
    """
    device = candidates.device
    batch_size, num_nodes = candidates.shape
    predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32, device="cpu")
    if unvisited is not None:
        predicts.copy_(unvisited.view(batch_size, num_nodes))
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32, device="cpu")
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    most_accepted = spec_steps if most_accepted is None else most_accepted
    tokens, retrieved = candidates.tolist(), retrieve_index.tolist()
    first_child, next_sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for request in range(batch_size):
        own = range(request * num_nodes, (request + 1) * num_nodes)
        if retrieved[request][0] not in own:
            continue
        node, accepted, met = 0, 0, {0}
        accept_index[request, 0] = retrieved[request][0]
        while True:
            token = token_at(request, node)
            predicts[request, node] = token
            child, after, is_match = first_child[request][node], node, False
            while (child > 0 and child not in met if any_order else after < child) and not is_match:
                if child >= num_nodes or retrieved[request][child] not in own:
                    break
                met.add(child)
                is_match = tokens[request][child] == token
                if not is_match:
                    child, after = next_sibling[request][child], child
            if not is_match or token < 0 or accepted == most_accepted:
                break
            node, accepted = child, accepted + 1
            accept_index[request, accepted] = retrieved[request][node]
        accept_token_num[request] = accepted
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))


def children(
    retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor
) -> Callable[[int, int], list[int]]:
    """Returns the function (request, node) -> its children in sibling order, which end where a walk ends."""
    num_nodes = retrieve_index.shape[1]
    retrieved, first_child = retrieve_index.tolist(), retrieve_next_token.tolist()
    next_sibling = retrieve_next_sibling.tolist()

    def children_of(request: int, node: int) -> list[int]:
        found, after, child = [], node, first_child[request][node]
        while after < child < num_nodes and retrieved[request][child] // num_nodes == request:
            found.append(child)
            after, child = child, next_sibling[request][child]
        return found

    return children_of


def write_paths(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    spec_steps: int,
    path_of: Callable[[int], list[int]],
    bonus_at: Callable[[int, int], int],
) -> Output:
    """Returns the Output for the paths `path_of(request)`, nodes from the root on; dead rows are not asked for."""
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32, device="cpu")
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32, device="cpu")
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    for request in range(batch_size):
        if int(retrieve_index[request, 0]) // num_nodes != request:
            continue
        path = path_of(request)
        for node, after in zip(path, path[1:]):
            predicts[request, node] = candidates[request, after]
        predicts[request, path[-1]] = bonus_at(request, path[-1])
        accept_index[request, : len(path)] = retrieve_index[request, path]
        accept_token_num[request] = len(path) - 1
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))
