"""The reader of a draft model that has the text as keys of features alone, and fills in a block of masks (DFlash)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.kv_pool import PrefillAttend, TreeAttend
from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed
from ..models.protocol import ContextDraft
from .block_drafter import BlockLevels
from .protocol import PromptPart
from .readers import attend_chain


class ContextReader:
    """Stores the target's features of committed tokens as keys and values (a `Reader`), that of token t_i at position
    and slot i. The root has no feature yet; it is the first token of the block, whose keys the next features replace.

    num_levels  levels that it drafts
    num_steps   the most drafts that a step accepts, those of other drafters included
    """

    ahead = 0

    def __init__(self, model: ContextDraft, num_levels: int, num_steps: int):
        self.model, self.num_kept, self.num_levels = model, CATCH_UP_EVERY, num_levels
        self.num_slots = max(model.block_size, num_steps + 1)

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Stores the features of the parts' tokens."""
        device = state.roots.device
        spans = [(part.start, part.features.shape[1]) for part in parts]
        positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in spans])[None]
        attend = PrefillAttend(state.draft_pool, torch.cat([part.block_table for part in parts]), spans)
        self.model.store_features(torch.cat([part.features for part in parts], dim=1), positions, attend)
        for part in parts:
            state.num_behind[part.row] = 0

    def levels(self, batch: Batch) -> ContextLevels:
        return ContextLevels(self.model, batch, self.num_levels)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Stores the features of the root and the accepted drafts; those of rows past them are written over."""
        width = committed.tokens.shape[1]
        positions, slots = batch.positions[:, :width], batch.slots[:, :width]
        attend = TreeAttend(
            batch.state.draft_pool, batch.block_table, batch.lengths, slots, width, None, positions
        )  # fmt: skip
        self.model.store_features(features.flatten(0, 1)[committed.hidden_rows], positions, attend)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Stores the features that plain steps kept."""
        rows = slice(0, num_rows)
        count, kept = state.num_behind[rows], state.kept[self.num_kept]
        first = (state.lengths[rows] - count).clamp(min=0)
        positions, attend = attend_chain(state, rows, first, self.num_kept, self.model.max_length)
        self.model.store_features(kept.features[rows], positions, attend)
        count.zero_()


class ContextLevels(BlockLevels):
    """Fills in the block after the roots; level by level, at most num_levels."""

    def __init__(self, model: ContextDraft, batch: Batch, num_levels: int):
        self._model, self._batch, self._num_levels = model, batch, num_levels

    @functools.cached_property
    def _whole(self) -> Tensor:
        return self.block(self._num_levels)

    @property
    def logits(self) -> Tensor:
        return self._whole[:, 0]

    def block(self, count: int) -> Tensor:
        batch, size = self._batch, self._model.block_size
        slots, positions = batch.slots[:, :size], batch.positions[:, :size]
        # every row of the block sees all of them
        all_rows = -1 if size == 64 else (1 << size) - 1
        sees = torch.full((len(batch), size, 1), all_rows, dtype=torch.int64, device=slots.device)
        pool = batch.state.draft_pool
        attend = TreeAttend(pool, batch.block_table, batch.lengths, slots, size, sees, positions)
        return self._model.fill_block(batch.roots, count, positions, attend)

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        return self._whole[:, depth].repeat_interleave(tokens.shape[1], dim=0)
