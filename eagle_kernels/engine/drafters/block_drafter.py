"""Drafts of a model that says in one pass what the next tokens are, and the reader of one that needs no keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ... import ops
from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed
from ..batch.transfer import to_device
from ..config.eagle_config import EAGLEConfig
from ..models.protocol import BlockDraft
from ..models.running import run_block
from .protocol import Drafter, Levels, PromptPart, Proposal, Reader, lengths_sum


class BlockLevels(Levels, Protocol):
    """Computes all levels of a step's drafts at once. As `Levels`, it serves drafters that go level by level, too: what
    comes at a level is the same after every draft of the level before."""

    def block(self, count: int) -> Tensor:
        """Returns logits [B, count, Vd] of the `count` tokens after the roots."""


class BlockDrafter(Drafter):
    """Keeps the likeliest paths through the levels' distributions (`ops.build_tree_from_blocks`); topk=1 is a chain."""

    def __init__(self, reader: Reader, config: EAGLEConfig):
        super().__init__(config)
        self.reader, self.num_slots = reader, max(self.num_nodes, reader.num_slots)

    def propose(self, batch: Batch) -> Proposal:
        config, levels = self._config, self.reader.levels(batch)
        tree = ops.build_tree_from_blocks(
            batch.roots, levels.block(config.num_steps), batch.lengths, lengths_sum(batch, config),
            draft_to_target=self.reader.model.draft_to_target, topk=config.topk,
            num_verify_tokens=config.num_verify_tokens, tree_mask_mode=config.tree_mask_mode,
        )  # fmt: skip
        levels.finish()
        links = ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)])
        return Proposal(links, path_probs=tree.scores.exp)


class FeatureReader:
    """Reads nothing but the target's features of each row's last committed token (a `Reader`), which a model without
    keys drafts from, such as Medusa heads. Plain steps keep the features for it."""

    ahead, num_slots = 0, 0

    def __init__(self, model: BlockDraft, num_levels: int):
        self.model, self.num_kept, self._num_levels = model, CATCH_UP_EVERY, num_levels

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Takes the features of the last token of each prompt that ends here."""
        ends = [part for part in parts if part.is_last]
        if ends:
            rows = to_device([part.row for part in ends], state.roots.device)
            hidden = torch.cat([part.features[0, -1:] for part in ends])
            state.set_draft(rows, state.draft_logits[rows], hidden)

    def levels(self, batch: Batch) -> FeatureLevels:
        return FeatureLevels(self.model, batch.state.draft_hidden[batch.rows], self._num_levels)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Takes the target's features of the last accepted node, or of the root."""
        last = committed.hidden_rows.flatten()[committed.last_row]
        torch.index_select(features.flatten(0, 1), 0, last, out=batch.state.draft_hidden[batch.rows])

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Takes the features of the last token that was kept."""
        rows, row = slice(0, num_rows), torch.arange(num_rows, device=state.roots.device)
        count, held = state.num_behind[rows], state.draft_hidden[rows]
        last = state.kept[self.num_kept].features[row, (count - 1).clamp(min=0)]
        held.copy_(torch.where((count > 0)[:, None], last, held))
        count.zero_()


class FeatureLevels(BlockLevels):
    """Drafts from features [B, F]; level by level, at most num_levels."""

    def __init__(self, model: BlockDraft, hidden: Tensor, num_levels: int):
        self._model, self._hidden, self._num_levels = model, hidden, num_levels

    @functools.cached_property
    def _whole(self) -> Tensor:
        return self.block(self._num_levels)

    @property
    def logits(self) -> Tensor:
        return self._whole[:, 0]

    def block(self, count: int) -> Tensor:
        return run_block(self._model, self._hidden, count)

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        return self._whole[:, depth].repeat_interleave(tokens.shape[1], dim=0)
