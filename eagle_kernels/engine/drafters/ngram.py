"""Drafts from the request itself, what followed its last tokens earlier; alone, or with those of a model."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ...ops.draft.ngram_match import Output as NgramOutput
from ..batch.state import Batch
from ..config.drafting_options import MAX_NGRAM
from ..config.eagle_config import EAGLEConfig
from .model_drafter import ModelDrafter
from .protocol import Drafter, Drafts, Proposal, Reader, copy_probs, tree_of


class NgramDrafter(Drafter):
    """Proposes the continuation of the longest match (prompt lookup), or a tree of several different ones."""

    reads_history = True

    def propose(self, batch: Batch) -> Proposal:
        found = self._match(batch)
        return Proposal(tree_of(batch, found.tokens, found.parents, self._config))

    def drafts(self, batch: Batch) -> Drafts:
        """Takes n / (n + 1) as the probability that what followed a match of n tokens follows again, and likewise for
        the next match where that failed: what comes of it is measured."""
        found = self._match(batch)
        is_sibling = found.parents[:, :, None] == found.parents[:, None, :]
        rank = is_sibling.tril(-1).sum(-1)
        length = found.match_len[:, None].float()
        return Drafts(found.tokens, found.parents, length / (length + 1) ** (rank + 1))

    def _match(self, batch: Batch) -> NgramOutput:
        return match(batch, self._config, self.num_nodes - 1, self.num_steps, self._config.max_ngram_size)


def match(
    batch: Batch, config: EAGLEConfig, num_drafts: int, num_steps: int, max_ngram_size: int,
    draft_tokens: Tensor | None = None,
) -> NgramOutput:  # fmt: skip
    """Finds what followed the last tokens of each live row; draft_tokens [B, D], -1 padded, count as the last ones."""
    return ops.ngram_match(
        batch.state.history[batch.rows], (batch.lengths + 1) * batch.is_live, draft_tokens,
        num_speculative_tokens=num_drafts, spec_steps=num_steps, max_ngram_size=max_ngram_size,
        min_ngram_size=config.min_ngram_size, max_matches=config.topk, prefer=config.ngram_prefer,
    )  # fmt: skip


class HybridDrafter(ModelDrafter):
    """Drafts `num_model_steps` levels of `topk` with the model, and fills the remaining nodes from the history. If the
    model's best path continues a match of the history, what follows there is appended to it (FastDeploy's hybrid). If
    not, the history's own continuation becomes a branch below the root: one of the two may be right. But if
    `max_ngram_size` tokens match, text is being repeated: then the history's continuation comes first, and the model's
    drafts get the nodes that are left."""

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
        config = self._whole
        drafted, places = self._draft(batch)
        tokens = drafted.draft_tokens.view_as(drafted.retrieve_index)[:, 1:]
        parents = _parents(drafted.top_scores_index, places.parent_slots, config.topk)
        leaf, path = _best_path(tokens, drafted.retrieve_next_token, config.num_model_steps)
        num_drafts = self.num_nodes - 1
        beside = match(batch, config, num_drafts, self.num_steps, config.max_ngram_size)
        # the path, and the tokens before it that a match without a path would have, if the op can look back so far
        longest = min(MAX_NGRAM, config.max_ngram_size + config.num_model_steps)
        room, deeper = num_drafts - tokens.shape[1], self.num_steps - config.num_model_steps
        after = match(batch, config, room, deeper, longest, path)
        is_first = (beside.match_len == config.max_ngram_size)[:, None]
        # the match reaches past the model's drafts into the history
        is_after = (after.match_len > (path >= 0).sum(1))[:, None] & ~is_first
        model, found, follows = (
            pad(torch.stack(trie), (0, num_drafts - trie[0].shape[1]), value=-1)
            for trie in ((tokens, parents), (beside.tokens, beside.parents), (after.tokens, after.parents))
        )
        first = torch.where(is_first, found, model)
        second = torch.where(is_first, model, torch.where(is_after, follows, found))
        leaf = torch.where(is_after[:, 0], leaf, 0)
        tree = ops.merge_drafts(*first, *second, leaf, num_speculative_tokens=num_drafts)

        def path_probs() -> Tensor:
            probs = places.path_probs(drafted.top_scores_index)
            rows = zip(*(each.tolist() for each in (tree.tokens, tree.parents, tokens, parents, probs)))
            copied = [copy_probs(zip(*row[:2]), zip(*row[2:4]), row[4]) for row in rows]
            return torch.tensor(copied, dtype=torch.float32, device=tokens.device)

        return Proposal(tree_of(batch, tree.tokens, tree.parents, config), path_probs=path_probs)


def _parents(kept: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """Returns the nodes [B, N - 1] that are the parents of kept candidates, whose flat ids ascend."""
    candidate = parent_list.gather(1, kept // topk)
    return torch.where(candidate < 0, 0, 1 + torch.searchsorted(kept, candidate.contiguous()))


def _best_path(tokens: Tensor, first_child: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Returns the last node [B] and the tokens [B, num_levels], -1 padded, of the path of first children."""
    node, path = torch.zeros_like(first_child[:, :1]), []
    for _ in range(num_levels):
        child = first_child.gather(1, node)
        is_on = child >= 0  # and a leaf never is again
        node = torch.where(is_on, child, node)
        path.append(torch.where(is_on, tokens.gather(1, (node - 1).clamp(min=0)), -1))
    return node[:, 0], torch.cat(path, dim=1)
