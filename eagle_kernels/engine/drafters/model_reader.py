"""Reading with one draft model for all levels: an EAGLE head, a next-token module or a language model.

Positions, for a request with n committed tokens t_0 .. t_{n-1} and root t_n (sampled, not yet in the target's KV): the
draft reads token t_i at position and slot i - token_shift, for EAGLE together with the feature of t_{i-1}. So it holds
n + 1 - token_shift rows, and level i >= 1 of the tree reads its tokens at position n + i - token_shift.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ..batch.kv_pool import PrefillAttend, TreeAttend
from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed
from ..batch.transfer import to_device
from ..models.protocol import DraftModel, run_draft
from .protocol import PromptPart


class ModelReader:
    """The reader for one model, whose guess after a draft depends on what it made of the draft.

    num_levels, topk  levels that it drafts, and their width
    num_steps         the most drafts that a step accepts, those of other drafters included
    """

    def __init__(self, model: DraftModel, num_levels: int, topk: int, num_steps: int):
        self.model, self.num_kept = model, CATCH_UP_EVERY
        self._past_root, self.ahead = 1 - model.token_shift, model.token_shift
        self.num_slots = self._past_root + max((num_levels - 1) * topk, num_steps + 1)

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """See `Reader`. Row i reads token i + token_shift; without a shift, the root's row comes last.

        All parts are read at once if the model can do that. Before a prompt's last row only the keys are of use.
        """
        model, shift, device = self.model, self.model.token_shift, state.roots.device
        if len(parts) > 1 and not getattr(model, "reads_several", False):
            for part in parts:
                self.read_prompts(state, [part])
            return
        spans = [(part.start, len(part.tokens) - 1 + (self._past_root if part.is_last else 0)) for part in parts]
        tokens = torch.cat([part.tokens[shift : shift + count] for part, (_, count) in zip(parts, spans)])[None]
        if parts[0].features is None:
            features = state.draft_logits.new_zeros(*tokens.shape, 0)
        else:
            features = torch.cat([part.features for part in parts], dim=1)
        positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in spans])[None]
        read, tables = (tokens, features, positions), torch.cat([part.block_table for part in parts])
        attend = PrefillAttend(state.draft_pool, tables, spans)
        # prompts that end here: number of the part, row of the batch, last row of the part
        stops = itertools.accumulate(count for _, count in spans)
        ends = [(number, part.row, stop - 1) for number, (part, stop) in enumerate(zip(parts, stops)) if part.is_last]
        numbers, rows, lasts = to_device(ends, device).view(-1, 3).unbind(1)
        if hasattr(model, "store"):
            model.store(*read, attend)
            if not ends:
                return
            spans = [(start + count - 1, 1) for start, count in (spans[number] for number, _, _ in ends)]
            read, attend = [each[:, lasts] for each in read], PrefillAttend(state.draft_pool, tables[numbers], spans)
            lasts = slice(None)
        logits, hidden = run_draft(model, *read, attend, from_target=True)
        if ends:
            state.set_draft(rows, logits[0, lasts], hidden[0, lasts])

    def levels(self, batch: Batch) -> ModelLevels:
        """See `Reader`."""
        return ModelLevels(self.model, batch, self._past_root)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Reads the accepted path with the target's own features, over the rows of the tree.

        Row d reads the token after path node d with that node's feature; only later rows see those past the path.
        """
        levels = self.levels(batch)
        positions = levels.positions[:, : committed.tokens.shape[1]]
        output = run_draft(
            self.model,
            committed.tokens.clamp(min=0),
            features.flatten(0, 1)[committed.hidden_rows],
            positions,
            levels.attend(0, positions),
            from_target=True,
        )
        for held, read in ((levels.logits, output.logits), (levels.hidden, output.hidden)):
            torch.index_select(read.flatten(0, 1), 0, committed.last_row, out=held)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """See `Reader`. Only keys are written if no drafts are wanted next and the model can do that."""
        model, rows, memory = self.model, slice(0, num_rows), self.num_kept
        count, kept = state.num_behind[rows], state.kept[memory]
        first = state.lengths[rows] + self._past_root - count
        positions, attend = attend_chain(state, rows, first, memory, model.max_length)
        missed = kept.tokens[rows], kept.features[rows], positions, attend
        if not is_wanted and hasattr(model, "store"):
            model.store(*missed)
            count.zero_()
            return
        output = run_draft(model, *missed, from_target=True)
        last = torch.arange(num_rows, device=first.device) * memory + (count - 1).clamp(min=0)
        for held, read in ((state.draft_logits, output.logits), (state.draft_hidden, output.hidden)):
            held[rows].copy_(torch.where((count > 0)[:, None], read.flatten(0, 1)[last], held[rows]))
        count.zero_()


class ModelLevels:
    """See `Levels`; positions [B, M] are those after the rows that the model holds."""

    def __init__(self, model: DraftModel, batch: Batch, past_root: int):
        state = batch.state
        self._model, self._pool, self._block_table = model, state.draft_pool, batch.block_table
        self._slots, self.positions = batch.slots[:, past_root:], batch.positions[:, past_root:]
        self._lengths = batch.lengths + past_root if past_root else batch.lengths
        self.logits, self.hidden = state.draft_logits[batch.rows], state.draft_hidden[batch.rows]

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        """See `Levels`."""
        topk, hidden = tokens.shape[1], self.hidden
        if depth == 1:
            hidden = hidden[:, None].expand(-1, topk, -1)
        elif parents is not None:
            hidden = hidden.flatten(0, 1)[parents]
        key_positions = self.positions[:, :depth, None].expand(-1, -1, topk)
        positions = key_positions[:, -1]
        attend = self.attend((depth - 1) * topk, positions, ancestors, key_positions)
        output = run_draft(self._model, tokens, hidden, positions, attend, from_target=False)
        self.hidden = output.hidden
        return output.logits.flatten(0, 1)

    def finish(self) -> None:
        """Does nothing: `observe` overwrites the rows of drafts."""

    def attend(
        self, first: int, positions: Tensor, ancestors: Tensor | None = None, key_positions: Tensor | None = None
    ) -> TreeAttend:
        """Returns the `attend` of rows [B, T] from place `first` on; without ancestors, of a chain from place 0."""
        stop = first + positions.shape[1]
        slots = self._slots[:, first:stop]
        return TreeAttend(
            self._pool, self._block_table, self._lengths, slots, stop, ancestors, positions, key_positions
        )


def attend_chain(
    state: BatchState, rows: slice, first: Tensor, count: int, max_length: int
) -> tuple[Tensor, TreeAttend]:
    """Returns positions [B, count] and the `attend` of a chain that the draft reads from its rows `first` [B] on.

    A request with fewer tokens to read has padding in the last rows, in empty slots, which only later rows see.
    """
    pool, table = state.draft_pool, state.block_table[rows]
    slots, positions = ops.find_slots(table, first, count=count, page_size=pool.page_size, max_length=max_length)
    return positions, TreeAttend(pool, table, first, slots, count, None, positions)
