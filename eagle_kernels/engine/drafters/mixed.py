"""Several methods in one batch: every request has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.batch import Batch
from .protocol import Drafter, Proposal

# the fields of a tree that depend on its drafts
_OF_ROWS = ("tree_mask", "positions", "retrieve_next_token", "retrieve_next_sibling", "draft_tokens")
# torch.where takes no unsigned words of bit masks on a GPU
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


class MixedDrafter:
    """All methods draft for all rows, and each row takes the drafts of its own method. All trees have the same size.

    parts: one drafter for each method, in their order; `BatchState.methods` has the number of each row's. A model reads
    the tokens of all rows, whichever method drafts for them.
    """

    def __init__(self, drafters: Sequence[Drafter]):
        self.parts = tuple(drafters)
        self.num_steps = max(drafter.num_steps for drafter in drafters)
        self.num_nodes = max(drafter.num_nodes for drafter in drafters)
        self.num_slots = max(drafter.num_slots for drafter in drafters)
        self.reads_history = any(drafter.reads_history for drafter in drafters)
        self.reader = next((drafter.reader for drafter in drafters if drafter.reader is not None), None)

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        method = batch.state.methods[batch.rows]
        proposals = [drafter.propose(batch) for drafter in self.parts]
        tree = proposals[0].tree
        for number, proposal in enumerate(proposals[1:], start=1):
            other = proposal.tree
            for name in _OF_ROWS:
                chosen = _choose(method == number, getattr(other, name), getattr(tree, name), len(batch))
                tree = tree._replace(**{name: chosen})

        def path_probs() -> Tensor:
            probs = torch.full(tree.retrieve_index[:, 1:].shape, float("nan"), device=method.device)
            for number, proposal in enumerate(proposals):
                if proposal.path_probs is not None:
                    probs = _choose(method == number, proposal.path_probs(), probs, len(batch))
            return probs

        return Proposal(tree, path_probs=path_probs)


def _choose(is_other: Tensor, other: Tensor, tensor: Tensor, num_rows: int) -> Tensor:
    """Takes each row of two tensors of B rows, [B, ..] or flat, from `other` or from `tensor`."""
    dtype = _SIGNED.get(tensor.dtype, tensor.dtype)
    rows = (each.view(dtype).view(num_rows, -1) for each in (other, tensor))
    return torch.where(is_other[:, None], *rows).view(tensor.dtype).view(tensor.shape)
