"""A draft model reads the text, and level after level its own drafts: an EAGLE head, a next-token module, a language
model.

Positions, for a request with n committed tokens t_0 .. t_{n-1} and root t_n (sampled, not yet in the target's KV): the
draft reads token t_i at position and slot i - token_shift, for EAGLE beside the feature of t_{i-1}. So it holds
n + 1 - token_shift rows, and level i >= 1 of the tree reads its tokens at position n + i - token_shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ..batch.batch import Batch, Committed
from ..batch.kv_pool import PrefillAttend, TreeAttend
from ..batch.state import CATCH_UP_EVERY, BatchState
from ..models.protocol import DraftModel


class ModelReader:
    """One model for all levels: what it says of a draft's children depends on what it made of the draft.

    num_levels, topk  levels that it drafts, and their width
    num_steps         the most drafts that a step accepts, others than its own included
    """

    def __init__(self, model: DraftModel, num_levels: int, topk: int, num_steps: int):
        self.model, self.num_kept = model, CATCH_UP_EVERY
        self._behind = 1 - model.token_shift
        self.num_slots = self._behind + max((num_levels - 1) * topk, num_steps + 1)

    def read_prompt(
        self,
        state: BatchState,
        row: int,
        block_table: Tensor,
        tokens: Tensor,
        features: Tensor | None,
        start: int,
        num_prompt: int,
    ) -> None:
        """Draft rows from `start` on, row i being token i + token_shift beside the feature of the token before it;
        without a shift the root's row comes last."""
        shift, stop = self.model.token_shift, start + len(tokens) - 1
        is_last = stop == num_prompt
        num_rows = stop - start + (self._behind if is_last else 0)
        if features is None:
            features = state.draft_logits.new_zeros(1, num_rows, 0)
        output = self.model.forward(
            tokens[None, shift : shift + num_rows],
            features,
            torch.arange(start, start + num_rows, device=tokens.device)[None],
            PrefillAttend(state.draft_pool, block_table, start, num_rows),
            from_target=True,
        )
        if is_last:
            state.set_draft(row, output.logits[0, -1], output.hidden[0, -1])

    def levels(self, batch: Batch) -> ModelLevels:
        """See `Reader`."""
        return ModelLevels(self.model, batch, _Rows(batch, self._behind))

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Reads the accepted path beside the target's true features; the rows of the tree are overwritten.

        Row d reads the token that follows path node d beside that node's feature; rows past the path are padding that
        only later rows see.
        """
        rows, count = _Rows(batch, self._behind), committed.tokens.shape[1]
        output = self.model.forward(
            committed.tokens.clamp(min=0),
            features.flatten(0, 1)[committed.hidden_rows],
            rows.positions[:, :count],
            rows.path_attend(count),
            from_target=True,
        )
        state = batch.state
        torch.index_select(output.logits.flatten(0, 1), 0, committed.last_row, out=state.draft_logits[batch.rows])
        torch.index_select(output.hidden.flatten(0, 1), 0, committed.last_row, out=state.draft_hidden[batch.rows])

    def keep(self, batch: Batch, roots: Tensor, features: Tensor) -> None:
        """See `Reader`."""
        batch.state.keep(batch.rows, self.num_kept, roots, features)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """See `Reader`; where no drafts are wanted next, keys are enough by now."""
        model, pool, rows, memory = self.model, state.draft_pool, slice(0, num_rows), self.num_kept
        count, table, kept = state.num_behind[rows], state.block_table[rows], state.kept[memory]
        first = state.lengths[rows] + self._behind - count
        slots, positions = ops.find_slots(
            table, first, count=memory, page_size=pool.page_size, max_length=model.max_length
        )
        # rows past what was missed are padding that only later rows see, in slots that hold nothing yet
        attend = TreeAttend(pool, table, first, slots, memory, None, positions)
        missed = kept.tokens[rows], kept.features[rows], positions, attend
        if not is_wanted and hasattr(model, "store"):
            model.store(*missed)
            count.zero_()
            return
        output = model.forward(*missed, from_target=True)
        last = torch.arange(num_rows, device=first.device) * memory + (count - 1).clamp(min=0)
        for held, read in ((state.draft_logits, output.logits), (state.draft_hidden, output.hidden)):
            held[rows].copy_(torch.where((count > 0)[:, None], read.flatten(0, 1)[last], held[rows]))
        count.zero_()


class ModelLevels:
    """See `Levels`."""

    def __init__(self, model: DraftModel, batch: Batch, rows: _Rows):
        self._model, self._rows = model, rows
        self.logits, self._hidden = batch.state.draft_logits[batch.rows], batch.state.draft_hidden[batch.rows]

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        """See `Levels`."""
        size, topk = tokens.shape
        hidden = self._hidden
        if depth == 1:
            hidden = hidden[:, None].expand(-1, topk, -1)
        elif parents is not None:
            hidden = hidden.flatten(0, 1)[parents]
        output = self._model.forward(
            tokens,
            hidden,
            self._rows.positions[:, depth - 1 : depth].expand(size, topk),
            self._rows.level_attend(depth, topk, ancestors),
            from_target=False,
        )
        self._hidden = output.hidden
        return output.logits.flatten(0, 1)

    def finish(self, num_levels: int) -> None:
        """Nothing: rows of drafts are written anew once it is known what was accepted."""


class _Rows:
    """Where the model's rows of a step go.

    positions  [B, M]  of the rows behind those that it holds
    """

    def __init__(self, batch: Batch, behind: int):
        self._pool, self._block_table = batch.state.draft_pool, batch.block_table
        self._slots, self.positions = batch.slots[:, behind:], batch.positions[:, behind:]
        self._lengths = batch.lengths + behind if behind else batch.lengths

    def level_attend(self, depth: int, topk: int, ancestors: Tensor) -> TreeAttend:
        """Of the beams of level `depth`, which see those of the levels before."""
        first, positions = (depth - 1) * topk, self.positions
        return TreeAttend(
            self._pool,
            self._block_table,
            self._lengths,
            self._slots[:, first : first + topk],
            first + topk,
            ancestors,
            positions[:, depth - 1 : depth].expand(-1, topk),
            positions[:, :depth, None].expand(-1, -1, topk),
        )

    def path_attend(self, num_rows: int) -> TreeAttend:
        """Of the accepted path, which is a chain."""
        return TreeAttend(
            self._pool,
            self._block_table,
            self._lengths,
            self._slots[:, :num_rows],
            num_rows,
            None,
            self.positions[:, :num_rows],
        )
