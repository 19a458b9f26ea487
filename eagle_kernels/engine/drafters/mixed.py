"""Several methods in one batch: every request has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.batch import Batch
from .protocol import Drafter, Proposal

# of a tree, what differs from row to row but for its place in the batch
_OF_ROWS = ("tree_mask", "positions", "retrieve_next_token", "retrieve_next_sibling", "draft_tokens")
# of the words of bit masks: on a GPU torch chooses between signed numbers only
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


class MixedDrafter:
    """All methods draft for all rows, and each row takes the drafts of its own; their trees have as many nodes.

    parts: one for each method, in their order; `BatchState.methods` says which row has which. A model reads the tokens
    of all rows, whoever drafts for them.
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
            chosen = {
                name: _choose(method == number, getattr(other, name), getattr(tree, name), len(batch))
                for name in _OF_ROWS
            }
            tree = tree._replace(**chosen)

        def path_probs() -> Tensor:
            probs = torch.full(tree.retrieve_index[:, 1:].shape, float("nan"), device=method.device)
            for number, proposal in enumerate(proposals):
                if proposal.path_probs is not None:
                    probs = _choose(method == number, proposal.path_probs(), probs, len(batch))
            return probs

        return Proposal(tree, path_probs=path_probs)


def _choose(is_other: Tensor, other: Tensor, tensor: Tensor, num_rows: int) -> Tensor:
    """Of two tensors of B rows, [B, ..] or flat, each row of the one or the other."""
    dtype = _SIGNED.get(tensor.dtype, tensor.dtype)
    rows = (each.view(dtype).view(num_rows, -1) for each in (other, tensor))
    return torch.where(is_other[:, None], *rows).view(tensor.dtype).view(tensor.shape)
