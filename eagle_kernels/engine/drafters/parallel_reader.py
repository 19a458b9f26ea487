"""The reader of a draft model that drafts several tokens in one pass, by mask tokens after the text.

Two kinds of models do so: language models (PARD, arXiv 2504.18583), and EAGLE-3 heads (P-EAGLE, arXiv 2602.01469),
which have a feature for masks as well. They are read as vLLM reads them (`copy_and_expand_eagle_inputs_kernel` in
v1/spec_decode/utils.py): after the row of the root come K - 1 rows with the mask token, at the positions that follow,
causal as all rows are. The root's row predicts the first draft, and row k of the masks draft k + 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed, Kept
from ..models.protocol import MaskedDraft
from ..models.running import run_draft
from .block_drafter import BlockLevels
from .protocol import PromptPart
from .readers import ModelReader, attend_chain


class ParallelReader:
    """Reads with a model that drafts by mask tokens (a `Reader`), in one pass for each step: the tokens that the step
    before brought, which `BatchState.kept` has with their features, and the masks after them.

    A request has n committed tokens and the root t_n. As `ModelReader` does, it reads token t_i at position and slot
    i - token_shift. `BatchState.num_behind` counts the tokens that are kept; the root is always one of them. The rows
    of masks are never kept: the next pass writes over their keys before a row sees them.

    num_levels  levels that it drafts, K
    num_steps   the most drafts that a step accepts, those of other drafters included
    """

    def __init__(self, model: MaskedDraft, num_levels: int, num_steps: int):
        self.model, self.ahead, self.num_levels = model, model.token_shift, num_levels
        self.past_root, self.num_rows = 1 - model.token_shift, num_steps + 1
        self.num_slots = self.past_root + self.num_rows + num_levels - 1
        self.num_kept = self.num_rows + CATCH_UP_EVERY
        self._prompts = ModelReader(model, 1, 1, num_steps)

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Reads all rows, and keeps the root's, which the first pass reads again."""
        self._prompts.read_prompts(state, parts)
        kept = state.kept[self.num_kept]
        for part in parts:
            if part.is_last:
                kept.tokens[part.row, 0] = part.tokens[-1]
                if part.features is not None:
                    kept.features[part.row, 0] = part.features[0, -1]
            state.num_behind[part.row] = int(part.is_last)

    def levels(self, batch: Batch) -> ParallelLevels:
        return ParallelLevels(self, batch.state, batch.rows)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Keeps the accepted tokens and the new root, which are read when it drafts next."""
        kept, count = self.kept_of(batch.state, batch.rows)
        width = committed.tokens.shape[1]
        kept.tokens[:, :width] = committed.tokens.clamp(min=0)
        kept.features[:, :width] = features.flatten(0, 1)[committed.hidden_rows]
        count.copy_(committed.new_seq_lens - batch.lengths)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept, and keeps the root."""
        rows = slice(0, num_rows)
        kept, count = self.kept_of(state, rows)
        read = self.rows_of(state, rows, kept.tokens, kept.features)
        if hasattr(self.model, "store"):
            self.model.store(*read)
        else:
            run_draft(self.model, *read, from_target=True)
        row, last = torch.arange(num_rows, device=count.device), (count - 1).clamp(min=0)
        for tensor in kept:
            tensor[:, 0] = tensor[row, last]
        count.clamp_(max=1)

    def kept_of(self, state: BatchState, rows: slice) -> tuple[Kept, Tensor]:
        """Returns what is kept of rows, and the number of tokens [B]."""
        return Kept(*(tensor[rows] for tensor in state.kept[self.num_kept])), state.num_behind[rows]

    def rows_of(self, state: BatchState, rows: slice, tokens: Tensor, features: Tensor) -> tuple:
        """Returns what `run_draft` takes of tokens [B, T] and features [B, T, F] from the first kept token on."""
        first = (state.lengths[rows] + self.past_root - state.num_behind[rows]).clamp(min=0)
        positions, attend = attend_chain(state, rows, first, tokens.shape[1], self.model.max_length)
        return tokens, features, positions, attend


class ParallelLevels(BlockLevels):
    """Drafts by mask tokens; level by level, at most the reader's num_levels."""

    def __init__(self, reader: ParallelReader, state: BatchState, rows: slice):
        self._reader, self._state, self._rows, self._has_read = reader, state, rows, False

    @functools.cached_property
    def _whole(self) -> Tensor:
        return self.block(self._reader.num_levels)

    @property
    def logits(self) -> Tensor:
        return self._whole[:, 0]

    def block(self, count: int) -> Tensor:
        """Reads what was kept and count - 1 masks; returns logits without the mask token, which is no draft."""
        reader, model, rows, self._has_read = self._reader, self._reader.model, self._rows, True
        kept, num_kept = reader.kept_of(self._state, rows)
        tokens = pad(kept.tokens[:, : reader.num_rows], (0, count - 1))
        features = pad(kept.features[:, : reader.num_rows], (0, 0, 0, count - 1))
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        places = num_kept[:, None] + torch.arange(count - 1, device=tokens.device)
        tokens.scatter_(1, places, model.mask_token_id)  # a number to places by brackets would wait for the device
        if model.mask_features is not None:
            features[row, places] = model.mask_features
        output = run_draft(model, *reader.rows_of(self._state, rows, tokens, features), from_target=True)
        last = (num_kept[:, None] - 1).clamp(min=0) + torch.arange(count, device=tokens.device)
        logits = output.logits[row, last]
        if model.masked_id is not None:
            logits[..., model.masked_id] = -torch.inf
        return logits

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        return self._whole[:, depth].repeat_interleave(tokens.shape[1], dim=0)

    def finish(self) -> None:
        if not self._has_read:
            self.block(1)
