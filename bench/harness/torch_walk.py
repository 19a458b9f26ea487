"""The plain torch formulation of walking a tree, which the verify benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .inputs import parents


def prepare_walk(values: dict) -> Callable[[torch.Tensor], dict]:
    """walk(target_predict [B, N]): accepts a node if it and all above it carry the target's token at their parent.

    Parents, depths and the ancestor mask, which a torch user has anyway, are made once from the links.
    """
    candidates = values["candidates"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    num_columns = values["spec_steps"] + 1
    parent = parents(values["retrieve_next_token"], values["retrieve_next_sibling"]).to(device)
    node = torch.arange(num_nodes, device=device)
    visible = torch.eye(num_nodes, dtype=torch.bool, device=device).expand(batch_size, -1, -1).clone()
    for child in range(1, num_nodes):
        visible[:, child] |= visible[torch.arange(batch_size, device=device), parent[:, child]]
    depth = visible.sum(-1) - 1
    request = torch.arange(batch_size, device=device)
    first_row = request[:, None] * num_nodes

    def walk(target_predict: torch.Tensor) -> dict:
        matches = candidates == target_predict.gather(1, parent.clamp(min=0))
        matches[:, 0] = True
        is_accepted = (matches[:, None, :] | ~visible).all(-1)
        last = torch.where(is_accepted, depth, -1).argmax(1)
        on_path = visible[request, last]
        path = torch.where(on_path, node, num_nodes).sort(dim=1).values[:, :num_columns]
        return {
            "predicts": torch.where(on_path, target_predict, -1).flatten().int(),
            "accept_index": torch.where(path < num_nodes, path + first_row, -1).int(),
            "accept_token_num": depth[request, last].int(),
        }

    return walk
