"""Drafts from the request itself: what followed its last tokens earlier in its prompt or output."""

from __future__ import annotations

from torch import Tensor

from ... import ops
from ...ops.draft.ngram_match import Output as NgramOutput
from ..batch.batch import Batch
from ..config.eagle_config import EAGLEConfig
from .protocol import Drafter, Proposal, tree_of


class NgramDrafter(Drafter):
    """Proposes the continuation of the longest match (prompt lookup), or a tree of several different ones."""

    reads_history = True

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        found = match(batch, self._config, self.num_nodes - 1, self.num_steps, self._config.max_ngram_size)
        return Proposal(tree_of(batch, found.tokens, found.parents, self._config))


def match(
    batch: Batch,
    config: EAGLEConfig,
    num_drafts: int,
    num_steps: int,
    max_ngram_size: int,
    draft_tokens: Tensor | None = None,
) -> NgramOutput:
    """Finds what followed the last tokens of each live row; draft_tokens [B, D], -1 padded, count as the last ones."""
    return ops.ngram_match(
        batch.state.history[batch.rows],
        (batch.lengths + 1) * batch.is_live,
        draft_tokens,
        num_speculative_tokens=num_drafts,
        spec_steps=num_steps,
        max_ngram_size=max_ngram_size,
        min_ngram_size=config.min_ngram_size,
        max_matches=config.topk,
        prefer=config.ngram_prefer,
    )
