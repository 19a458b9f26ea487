"""A model's drafts, and behind or beside them what the request itself says."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ..batch import Batch
from ..config import EAGLEConfig
from .model_drafter import ModelDrafter
from .ngram import match
from .protocol import Proposal, Reader
from .trees import tree_of


class HybridDrafter(ModelDrafter):
    """The model drafts `num_model_steps` levels of `topk`; the rest of the nodes goes to n-gram continuations.

    Where the model's best path continues a match of the history, what follows there is appended to it (FastDeploy's
    hybrid). Where it does not, the history's own continuation becomes a branch of its own below the root: one of the
    two may be right.
    """

    reads_history = True

    def __init__(self, reader: Reader, config: EAGLEConfig):
        self._whole = config
        levels = config.num_model_steps
        # of the whole configuration nothing else: rates and tables of trees are for as many levels as it has
        own = {"num_steps": levels, "num_draft_tokens": 1 + config.topk * levels}
        super().__init__(reader, EAGLEConfig(topk=config.topk, tree_mask_mode=config.tree_mask_mode, **own))
        self.num_steps, self.num_nodes = config.num_steps, config.num_verify_tokens
        self.num_slots = max(self.num_nodes, self.num_slots)

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        config = self._whole
        drafted, places = self._draft(batch)
        tokens = drafted.draft_tokens.view_as(drafted.retrieve_index)[:, 1:].contiguous()
        parents = _parents(drafted.top_scores_index, places.parent_slots, config.topk)
        leaf, path = _best_path(tokens, drafted.retrieve_next_token, config.num_model_steps)
        room = self.num_nodes - 1 - tokens.shape[1]
        behind = match(batch, config, room, self.num_steps - config.num_model_steps, config.topk, path)
        beside = match(batch, config, room, self.num_steps, config.topk)
        # a match that reaches past the model's drafts into the history
        is_behind = (behind.match_len > (path >= 0).sum(1))[:, None]
        tree = ops.merge_drafts(
            tokens,
            parents,
            torch.where(is_behind, behind.tokens, beside.tokens),
            torch.where(is_behind, behind.parents, beside.parents),
            torch.where(is_behind[:, 0], leaf, 0),
            num_speculative_tokens=self.num_nodes - 1,
        )

        def path_probs() -> Tensor:
            # the model's drafts come first, in their order; of the others nobody knows
            return torch.nn.functional.pad(places.path_probs(drafted.top_scores_index), (0, room), value=float("nan"))

        return Proposal(tree_of(batch, tree.tokens, tree.parents, config), path_probs=path_probs)


def _parents(kept: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """[B, N - 1]: the nodes that are the parents of kept candidates, whose flat ids ascend."""
    candidate = parent_list.gather(1, kept // topk)
    return torch.where(candidate < 0, 0, 1 + torch.searchsorted(kept, candidate.contiguous()))


def _best_path(tokens: Tensor, first_child: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """The last node [B] and the tokens [B, num_levels], -1 padded, of the path of first children."""
    node = torch.zeros_like(first_child[:, :1])
    is_on, path = node == 0, []
    for _ in range(num_levels):
        child = first_child.gather(1, node)
        is_on = is_on & (child >= 0)
        node = torch.where(is_on, child, node)
        path.append(torch.where(is_on, tokens.gather(1, (node - 1).clamp(min=0)), -1))
    return node[:, 0], torch.cat(path, dim=1)
