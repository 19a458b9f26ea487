"""Walking a token tree by its first-child / next-sibling links."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch


class Output(NamedTuple):
    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


def walk(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, spec_steps: int, token_at: Callable[[int, int], int],
    unvisited: torch.Tensor | None = None, any_order: bool = False, most_accepted: int | None = None,
) -> Output:  # fmt: skip
    """Follows from each root the child that carries `token_at(request, node)`, until none does or S are accepted.
    most_accepted: the limit, if not S.
    unvisited: predicts [B * N] off the path; None: -1.
    any_order: links may point to any node but the root; one to a node met before ends the walk."""
    most_accepted = spec_steps if most_accepted is None else most_accepted
    tree_of = trees(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)

    def verified(request: int) -> tuple[list[int], int]:
        tokens, *links = tree_of(request)
        path, met = [0], {0} if any_order else None
        while True:
            token = token_at(request, path[-1])
            matching = (child for child in children_in(*links, path[-1], met) if tokens[child] == token)
            child = next(matching, None)
            if child is None or token < 0 or len(path) > most_accepted:
                return path, token
            path.append(child)

    return write_paths(candidates, retrieve_index, spec_steps, verified, unvisited)


def children(
    retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor
) -> Callable[[int, int], list[int]]:
    """Returns the function (request, node) -> its children in sibling order, which end where a walk ends."""
    retrieved, first_child, next_sibling = (
        links.tolist() for links in (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    )

    def children_of(request: int, node: int) -> list[int]:
        found = children_in(first_child[request], next_sibling[request], node)
        return list(takewhile(lambda child: retrieved[request][child] // len(retrieved[request]) == request, found))

    return children_of


def children_in(
    first_child: Sequence[int], next_sibling: Sequence[int], node: int, met: set[int] | None = None
) -> Iterator[int]:
    """Yields the children of a node in sibling order, until a link does not point forward within the tree.
    met, for trees in any order: the root and all nodes met so far, to which no link may lead; the children are
    added."""
    child, after = first_child[node], node
    while (after < child if met is None else child > 0 and child not in met) and child < len(first_child):
        if met is not None:
            met.add(child)
        yield child
        child, after = next_sibling[child], child


def trees(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
) -> Callable[[int], tuple[list[int], list[int], list[int]]]:  # fmt: skip
    """Returns the function request -> (tokens, first children, next siblings) of its nodes.
    A node of another request ends the list it is met in: it has no token and no sibling."""
    num_nodes = candidates.shape[1]
    is_own = retrieve_index // num_nodes == torch.arange(len(candidates), device=candidates.device)[:, None]
    tokens, siblings = (torch.where(is_own, links, -1).tolist() for links in (candidates, retrieve_next_sibling))
    return lambda request: (tokens[request], retrieve_next_token[request].tolist(), siblings[request])


def links_of(parents: list[list[int]], num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns first children and next siblings [B, N] of nodes with these parents, which are -1 for none."""
    next_token, next_sibling = (torch.full((len(parents), num_nodes), -1, device="cpu") for _ in range(2))
    for request, parent_of in enumerate(parents):
        last_child: dict[int, int] = {}
        for node, parent in enumerate(parent_of):
            if parent in last_child:
                next_sibling[request, last_child[parent]] = node
            elif parent >= 0:
                next_token[request, parent] = node
            if parent >= 0:
                last_child[parent] = node
    return next_token, next_sibling


def write_paths(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, spec_steps: int,
    verified: Callable[[int], tuple[list[int], int]], unvisited: torch.Tensor | None = None,
) -> Output:  # fmt: skip
    """Returns the Output of `verified(request)`, the path from the root on and its bonus; dead rows are not asked for.
    unvisited: predicts [B * N] off the path; None: -1."""
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32, device="cpu")
    if unvisited is not None:
        predicts.copy_(unvisited.view(batch_size, num_nodes))
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32, device="cpu")
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    for request in range(batch_size):
        if int(retrieve_index[request, 0]) // num_nodes != request:
            continue
        path, bonus = verified(request)
        for node, after in zip(path, path[1:]):
            predicts[request, node] = candidates[request, after]
        predicts[request, path[-1]] = bonus
        accept_index[request, : len(path)] = retrieve_index[request, path]
        accept_token_num[request] = len(path) - 1
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))
