"""Drafts from the request itself: what followed its last tokens earlier in prompt or output."""

from __future__ import annotations

from torch import Tensor

from ... import ops
from ..batch import Batch, Committed
from ..config import EAGLEConfig
from .protocol import Proposal


class NgramDrafter:
    """Prompt lookup: the continuation of the longest match, or a tree of several different ones."""

    model = None
    reads_history = True

    def __init__(self, config: EAGLEConfig):
        self._config = config
        self.num_steps, self.num_nodes = config.num_steps, config.num_verify_tokens
        self.num_slots = self.num_nodes

    def read_prompt(self, *_) -> None:
        """The history is all there is to read."""

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        found = match(batch, self._config, self.num_nodes - 1, self.num_steps, self._config.topk)
        return Proposal(tree_of(batch, found.tokens, found.parents, self._config))

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """The step itself writes the history."""


def match(
    batch: Batch,
    config: EAGLEConfig,
    num_drafts: int,
    num_steps: int,
    max_matches: int,
    draft_tokens: Tensor | None = None,
):
    """What followed the last tokens of each live row; draft_tokens [B, D], -1 padded, count as the last ones."""
    return ops.ngram_match(
        batch.state.history[batch.rows],
        (batch.lengths + 1) * batch.is_live,
        draft_tokens,
        num_speculative_tokens=num_drafts,
        spec_steps=num_steps,
        max_ngram_size=config.max_ngram_size,
        min_ngram_size=config.min_ngram_size,
        max_matches=max_matches,
        prefer=config.ngram_prefer,
    )


def tree_of(batch: Batch, tokens: Tensor, parents: Tensor, config: EAGLEConfig) -> ops.BuildTreeOutput:
    """The tree of drafts [B, N - 1] with the nodes that are their parents, -1 where there is no draft."""
    is_full = config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK
    return ops.tree_from_parents(
        batch.roots,
        tokens,
        parents,
        batch.lengths,
        **({"seq_lens_sum": int(batch.lengths.sum())} if is_full else {}),
        num_verify_tokens=1 + tokens.shape[1],
        tree_mask_mode=config.tree_mask_mode,
    )
