"""A model's drafts, and after, beside or before them what followed the same tokens earlier in the request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ..batch.batch import Batch
from ..config.drafting_options import MAX_NGRAM
from ..config.eagle_config import EAGLEConfig
from .model_drafter import ModelDrafter
from .ngram import match
from .protocol import Proposal, Reader
from .trees import tree_of


class Trie(NamedTuple):
    """Drafts [B, M] and the nodes [B, M] that are their parents; 0 is the root, -1 no draft."""

    tokens: Tensor
    parents: Tensor

    def padded(self, num_drafts: int) -> Trie:
        return Trie(*(pad(tensor, (0, num_drafts - tensor.shape[1]), value=-1) for tensor in self))

    def where(self, is_own: Tensor, other: Trie) -> Trie:
        """Takes the rows `is_own` of this trie, and the others of `other`."""
        return Trie(*(torch.where(is_own, *pair) for pair in zip(self, other)))


class HybridDrafter(ModelDrafter):
    """The model drafts `num_model_steps` levels of `topk`; the remaining nodes go to n-gram continuations.

    If the model's best path continues a match of the history, what follows there is appended to it (FastDeploy's
    hybrid). If not, the history's own continuation becomes a branch below the root: one of the two may be right. But if
    `max_ngram_size` tokens match, text is being repeated: then the history's continuation comes first, and the model's
    drafts get the nodes that are left.
    """

    reads_history = True

    def __init__(self, reader: Reader, config: EAGLEConfig):
        self._whole = config
        levels = config.num_model_steps
        # simulated rates and tables of trees do not fit a tree with fewer levels
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
        drafts = Trie(tokens, parents)
        num_drafts = self.num_nodes - 1
        beside = match(batch, config, num_drafts, self.num_steps, config.max_ngram_size)
        # the path, and as many tokens of the history as else, if the op can look so far back
        longest = min(MAX_NGRAM, config.max_ngram_size + config.num_model_steps)
        room, deeper = num_drafts - tokens.shape[1], self.num_steps - config.num_model_steps
        after = match(batch, config, room, deeper, longest, path)
        is_first = (beside.match_len == config.max_ngram_size)[:, None]
        # the match reaches past the model's drafts into the history
        is_after = (after.match_len > (path >= 0).sum(1))[:, None] & ~is_first
        found, follows = (Trie(each.tokens, each.parents).padded(num_drafts) for each in (beside, after))
        model = drafts.padded(num_drafts)
        first, second = found.where(is_first, model), model.where(is_first, follows.where(is_after, found))
        leaf = torch.where(is_after[:, 0], leaf, 0)
        tree = ops.merge_drafts(*first, *second, leaf, num_speculative_tokens=num_drafts)

        def path_probs() -> Tensor:
            return _at_new_places(places.path_probs(drafted.top_scores_index), drafts, Trie(tree.tokens, tree.parents))

        return Proposal(tree_of(batch, tree.tokens, tree.parents, config), path_probs=path_probs)


def _parents(kept: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """Returns the nodes [B, N - 1] that are the parents of kept candidates, whose flat ids ascend."""
    candidate = parent_list.gather(1, kept // topk)
    return torch.where(candidate < 0, 0, 1 + torch.searchsorted(kept, candidate.contiguous()))


def _at_new_places(values: Tensor, trie: Trie, merged: Trie) -> Tensor:
    """Moves values [B, M] of a trie's nodes to their places in the trie it was merged into; NaN at other nodes."""
    moved = values.new_full((len(values), 1 + merged.tokens.shape[1]), float("nan"))
    place = torch.zeros_like(trie.tokens[:, :1])
    for node in range(trie.tokens.shape[1]):
        token, parent = trie.tokens[:, node, None], trie.parents[:, node, None]
        above = place.gather(1, parent.clamp(min=0))
        is_it = (merged.parents == above) & (merged.tokens == token) & (above >= 0) & (parent >= 0)
        found = torch.where(is_it.any(1, keepdim=True), 1 + is_it.int().argmax(1, keepdim=True), -1)
        # nodes that were left out go to the root's place, which is cut off
        moved.scatter_(1, found.clamp(min=0), values[:, node, None])
        place = torch.cat([place, found], dim=1)
    return moved[:, 1:]


def _best_path(tokens: Tensor, first_child: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Returns the last node [B] and the tokens [B, num_levels], -1 padded, of the path of first children."""
    node = torch.zeros_like(first_child[:, :1])
    is_on, path = node == 0, []
    for _ in range(num_levels):
        child = first_child.gather(1, node)
        is_on = is_on & (child >= 0)
        node = torch.where(is_on, child, node)
        path.append(torch.where(is_on, tokens.gather(1, (node - 1).clamp(min=0)), -1))
    return node[:, 0], torch.cat(path, dim=1)
