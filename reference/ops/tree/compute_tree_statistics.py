"""Reference of compute_tree_statistics: nodes in ascending order, each below the first link that names it."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    depths: torch.Tensor
    num_linked: torch.Tensor
    num_leaves: torch.Tensor
    max_branching: torch.Tensor
    nodes_per_depth: torch.Tensor


def compute_tree_statistics(
    retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor, *, spec_steps: int
) -> Output:
    """See eagle_kernels/ops/tree/compute_tree_statistics.py."""
    device, (batch_size, num_nodes) = retrieve_next_token.device, retrieve_next_token.shape
    rows = [
        _statistics(children, siblings, num_nodes, spec_steps)
        for children, siblings in zip(retrieve_next_token.tolist(), retrieve_next_sibling.tolist())
    ]
    table = torch.tensor(rows, dtype=torch.int32, device=device).view(batch_size, 5 + spec_steps)
    parts = (*table[:, :4].unbind(1), table[:, 4:])
    return Output(*(part.clone(memory_format=torch.contiguous_format) for part in parts))


def _statistics(children: list[int], siblings: list[int], num_nodes: int, spec_steps: int) -> list[int]:
    """Depth, linked nodes, leaves, branching, then the nodes of each depth."""
    named_by: dict[int, tuple[int, bool]] = {}
    for node in range(num_nodes):
        if node < children[node] < num_nodes:
            named_by.setdefault(children[node], (node, True))
        if 0 < node < siblings[node] < num_nodes:
            named_by.setdefault(siblings[node], (node, False))
    depth, place = {0: 0}, {0: 0}  # of linked nodes; place among the siblings, from 1
    for node in range(1, num_nodes):
        before, is_child = named_by.get(node, (-1, False))
        if before in depth:
            depth[node] = depth[before] + is_child
            place[node] = 1 if is_child else place[before] + 1
    leaves = [node for node in depth if not node < children[node] < num_nodes]
    histogram = [list(depth.values()).count(level) for level in range(spec_steps + 1)]
    return [max(depth.values()), len(depth), len(leaves), max(place.values()), *histogram]
