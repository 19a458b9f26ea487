"""The plain torch formulation of walking a tree, which the verify benchmarks share."""

from __future__ import annotations

import torch

from .inputs import parents


class Walk:
    """Walks trees with tensor operations; what a torch user has anyway is made once, from the links.

    above: the parent of each node [B, N], the root's is the root; visible: its ancestors and itself [B, N, N].
    """

    def __init__(self, values: dict):
        self.candidates, self.num_columns = values["candidates"], values.get("spec_steps", 0) + 1
        device, (batch_size, self.num_nodes) = self.candidates.device, self.candidates.shape
        parent = parents(values).to(device)
        self.node, self.request = (torch.arange(size, device=device) for size in (self.num_nodes, batch_size))
        self.visible = torch.eye(self.num_nodes, dtype=torch.bool, device=device).expand(batch_size, -1, -1).clone()
        for child in range(1, self.num_nodes):
            self.visible[:, child] |= self.visible[self.request, parent[:, child]]
        self.depth = self.visible.sum(-1) - 1
        self.above = parent.clamp(min=0)
        self._first_row = self.request[:, None] * self.num_nodes

    def follow(self, target_predict: torch.Tensor) -> dict:
        """Accepts a node if it and all above it carry the target's token [B, N] at their parent."""
        _, on_path, outputs = self.accept(self.candidates == target_predict.gather(1, self.above))
        return {"predicts": torch.where(on_path, target_predict, -1).flatten().int()} | outputs

    def accept(self, matches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Accepts a node if it and all above it match; returns the last one [B], the path as a mask, and outputs."""
        matches[:, 0] = True
        is_accepted = (matches[:, None, :] | ~self.visible).all(-1)
        last = torch.where(is_accepted, self.depth, -1).argmax(1)
        on_path = self.visible[self.request, last]
        path = torch.where(on_path, self.node, self.num_nodes).sort(dim=1).values[:, : self.num_columns]
        return last, on_path, {
            "accept_index": torch.where(path < self.num_nodes, path + self._first_row, -1).int(),
            "accept_token_num": self.depth[self.request, last].int(),
        }  # fmt: skip
