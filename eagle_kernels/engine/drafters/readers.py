"""The readers of draft models: one model for all levels of drafts, or one next-token module for each of them.

Below, a request has n committed tokens t_0 .. t_{n-1} and the root t_n (sampled, not yet in the target's KV).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ..batch.kv_pool import PrefillAttend, TreeAttend
from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed, Kept
from ..batch.transfer import to_device
from ..models.protocol import DraftModel, DraftModules
from ..models.running import fused_weight, run_draft
from .protocol import Levels, PromptPart


class ModelReader:
    """Reads with one model (a `Reader`), whose guess after a draft depends on what it made of the draft: an EAGLE head,
    a next-token module or a language model.

    It reads token t_i at position and slot i - token_shift, for EAGLE together with the feature of t_{i-1}. So it holds
    n + 1 - token_shift rows, and level i >= 1 of the tree reads its tokens at position n + i - token_shift.

    num_levels, topk  levels that it drafts, and their width
    num_steps         the most drafts that a step accepts, those of other drafters included
    """

    def __init__(self, model: DraftModel, num_levels: int, topk: int, num_steps: int):
        self.model, self.num_kept = model, CATCH_UP_EVERY
        self._past_root, self.ahead = 1 - model.token_shift, model.token_shift
        self.num_slots = self._past_root + max((num_levels - 1) * topk, num_steps + 1)

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Reads token i + token_shift in row i; without a shift, the root's row comes last. All parts are read at once
        if the model can do that. Before a prompt's last row only the keys are of use."""
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
        return ModelLevels(self.model, batch, self._past_root)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Reads the accepted path with the target's own features, over the rows of the tree. Row d reads the token
        after path node d with that node's feature; only later rows see those past the path."""
        levels = self.levels(batch)
        positions = levels.positions[:, : committed.tokens.shape[1]]
        read = committed.tokens.clamp(min=0), features.flatten(0, 1)[committed.hidden_rows], positions
        output = run_draft(self.model, *read, levels.attend(0, positions), from_target=True)
        for held, read in ((levels.logits, output.logits), (levels.hidden, output.hidden)):
            torch.index_select(read.flatten(0, 1), 0, committed.last_row, out=held)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept; writes only keys if no drafts are wanted next and the model can do that."""
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


class ModelLevels(Levels):
    """Drafts with one model, in rows that `observe` overwrites; positions [B, M] are those after the rows it holds."""

    def __init__(self, model: DraftModel, batch: Batch, past_root: int):
        state = batch.state
        self._model, self._pool, self._block_table = model, state.draft_pool, batch.block_table
        self._slots, self.positions = batch.slots[:, past_root:], batch.positions[:, past_root:]
        self._lengths = batch.lengths + past_root if past_root else batch.lengths
        self.logits, self.hidden = state.draft_logits[batch.rows], state.draft_hidden[batch.rows]

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        return self._read(depth, tokens, ancestors, parents)

    def select(
        self, depth: int, above: ops.SelectTopKTokensOutput, offsets: Tensor | None, out: tuple[Tensor, ...]
    ) -> ops.SelectTopKTokensOutput:
        weight = fused_weight(self._model, above.tokens.numel())
        if weight is None:
            return super().select(depth, above, offsets, out)
        rows = self._read(depth, above.tokens, above.ancestors, above.hidden_rows, projects=False)
        # prefetch_weight: no kernel of a step writes weights
        options = {"topk": above.tokens.shape[1], "level": depth, "prefetch_weight": True}
        return ops.select_from_head(rows, weight, above.scores, above.ancestors, offsets, **options, out=out)

    def _read(
        self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None, **which: bool
    ) -> Tensor:
        """Reads a level; which: `projects` of the model's `forward`, whose first result this returns, [B * K, ..]."""
        topk, hidden = tokens.shape[1], self.hidden
        if depth == 1:
            hidden = hidden[:, None].expand(-1, topk, -1)
        elif parents is not None:
            hidden = hidden.flatten(0, 1)[parents]
        key_positions = self.positions[:, :depth, None].expand(-1, -1, topk)
        positions = key_positions[:, -1]
        attend = self.attend((depth - 1) * topk, positions, ancestors, key_positions)
        output = run_draft(self._model, tokens, hidden, positions, attend, from_target=False, **which)
        self.hidden = output.hidden
        return output.logits.flatten(0, 1)

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
    """Returns positions [B, count] and the `attend` of a chain that the draft reads from its rows `first` [B] on. A
    request with fewer tokens to read has padding in the last rows, in empty slots, which only later rows see."""
    pool, table = state.draft_pool, state.block_table[rows]
    slots, positions = ops.find_slots(table, first, count=count, page_size=pool.page_size, max_length=max_length)
    return positions, TreeAttend(pool, table, first, slots, count, None, positions)


class ModuleReader:
    """Reads with the first `num_modules` >= 2 modules of a model (a `Reader`), one for each level of a chain
    (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Module k = 1 .. M reads, in row i, what module k - 1 made of row i (the first one: the target's feature of t_i)
    together with token t_{i+k}, attends to its own rows before, and predicts t_{i+k+1}.

    Rows are 0 .. n - 1, at positions and slots of the same number. In the last row module k predicts draft number k.
    There it reads draft k - 1, and in the k - 2 rows before it reads drafts too. So all modules read the rows from
    n - M + 1 on again when it is known what was accepted: `BatchState.kept` has the last `BatchState.num_behind` tokens
    of each row, in draft row i token t_{i+1}, with the features they are read with. Rows before are read for good.

    num_steps  the most drafts that a step accepts, those of other drafters included
    """

    def __init__(self, model: DraftModules, num_modules: int, num_steps: int):
        self.model, self.num_modules, self.ahead = model, num_modules, num_modules
        self._num_open = num_modules - 1  # rows in which later modules read drafts
        self.num_rows = self.num_slots = self._num_open + num_steps + 1
        self.num_kept = self.num_rows + CATCH_UP_EVERY

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Reads all but the last rows, which lack tokens of the next part and are read again with it, for good."""
        kept, read = state.kept[self.num_kept], [self._read_prompt(state, part) for part in parts]
        for part, (tokens, features) in zip(parts, read):  # once all is read, as reading may be tried again
            left = min(len(tokens), self._num_open)
            kept.tokens[part.row, :left] = tokens[len(tokens) - left :]
            kept.features[part.row, :left] = features[0, len(tokens) - left :]
            state.num_behind[part.row] = left

    def _read_prompt(self, state: BatchState, part: PromptPart) -> tuple[Tensor, Tensor]:
        """Returns the tokens that were read, and the features with which they were."""
        kept, row, first = state.kept[self.num_kept], part.row, max(part.start - self._num_open, part.num_shared)
        held = part.start - first
        tokens = torch.cat([kept.tokens[row, :held], part.tokens[1:]])
        features = hidden = torch.cat([kept.features[None, row, :held], part.features], dim=1)
        count = len(tokens)
        positions = torch.arange(first, first + count, device=tokens.device)[None]
        attend = PrefillAttend(state.draft_pool, part.block_table, [(first, count)])
        ahead = torch.cat([tokens, tokens.new_zeros(self._num_open)])[None]
        for module in range(self.num_modules):
            hidden = self.model.advance(ahead[:, module : module + count], hidden, positions, attend, module=module)
        return tokens, features

    def levels(self, batch: Batch) -> ModuleLevels:
        return ModuleLevels(self, batch.state, batch.rows, self.num_rows, is_drafting=True)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Keeps the accepted tokens, which the modules read when they draft next."""
        kept, count = self._drop_read(batch.state, batch.rows)
        place = count[:, None] + torch.arange(committed.tokens.shape[1], device=count.device)
        row = torch.arange(len(count), device=count.device)[:, None]
        kept.tokens[row, place] = committed.tokens.clamp(min=0)
        kept.features[row, place] = features.flatten(0, 1)[committed.hidden_rows]
        count.add_(committed.new_seq_lens - batch.lengths)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        rows = slice(0, num_rows)
        ModuleLevels(self, state, rows, self.num_kept).finish()
        self._drop_read(state, rows)

    def _drop_read(self, state: BatchState, rows: slice) -> tuple[Kept, Tensor]:
        """Drops what has been read for good, and returns what is still kept and the number of tokens [B]."""
        kept, count = Kept(*(tensor[rows] for tensor in state.kept[self.num_kept])), state.num_behind[rows]
        left = count.clamp(max=self._num_open)
        places = (count - left)[:, None] + torch.arange(self._num_open, device=count.device)
        for tensor in kept:
            tensor[:, : self._num_open] = _rows_of(tensor, places)
        count.copy_(left)
        return kept, count


class ModuleLevels(Levels):
    """Drafts chains, K = 1: one module after the other reads the first `num_rows` kept rows. If it is not
    drafting, the modules read alone, and there are no logits."""

    logits: Tensor

    def __init__(self, reader: ModuleReader, state: BatchState, rows: slice, num_rows: int, is_drafting: bool = False):
        self._model, self._left, self._num_rows = reader.model, list(range(reader.num_modules)), num_rows
        kept, self._count = state.kept[reader.num_kept], state.num_behind[rows]
        # a row whose prompt is being read has no length yet
        first = (state.lengths[rows] - self._count).clamp(min=0)
        self._positions, self._attend = attend_chain(state, rows, first, num_rows, self._model.max_length)
        tokens = kept.tokens[rows, :num_rows]
        self._tokens = torch.cat([tokens, tokens.new_zeros(len(tokens), reader.num_modules)], dim=1)
        self._hidden = kept.features[rows, :num_rows]
        if is_drafting:
            self.logits = self.predict()

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        self._tokens.scatter_(1, self._count[:, None] + depth - 1, tokens)
        return self.predict()

    def finish(self) -> None:
        """Reads with the modules that have not drafted, since other steps may draft with them."""
        while self._left:
            self._read()

    def predict(self) -> Tensor:
        """Reads with the next module, and returns its logits [B, Vd] in the last rows."""
        self._read()
        last = (self._count - 1).clamp(min=0)[:, None]
        return self._model.project(_rows_of(self._hidden, last))[:, 0]

    def _read(self) -> None:
        """Reads with the next module, whose row j takes the token `module` places further on."""
        module = self._left.pop(0)
        tokens = self._tokens[:, module : module + self._num_rows]
        self._hidden = self._model.advance(tokens, self._hidden, self._positions, self._attend, module=module)


def _rows_of(tensor: Tensor, places: Tensor) -> Tensor:
    """Returns [B, T, ..] of a tensor [B, C, ..] at places [B, T]; places outside give some row."""
    batch = torch.arange(len(tensor), device=tensor.device)[:, None]
    return tensor[batch, places.clamp(0, tensor.shape[1] - 1)]
