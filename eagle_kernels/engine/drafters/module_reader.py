"""Reading with next-token modules, one for each level of a chain (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k = 1 .. M reads, in row i, what module k - 1 made of row i (the first one: the target's feature of t_i) together
with token t_{i+k}, attends to its own rows before, and predicts t_{i+k+1}.

For a request with n committed tokens t_0 .. t_{n-1} and root t_n the rows are 0 .. n - 1, at positions and slots of the
same number. In the last row module k predicts draft number k. There it reads draft k - 1, and in the k - 2 rows before
it reads drafts too. So all modules read rows from n - M + 1 on again when it is known what was accepted: their tokens
and features are kept between steps, together with those that the last step brought.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.kv_pool import PrefillAttend
from ..batch.state import CATCH_UP_EVERY, Batch, BatchState, Committed, Kept
from ..models.protocol import DraftModules
from .model_reader import attend_chain
from .protocol import PromptPart


class ModuleReader:
    """The reader for the first `num_modules` >= 2 modules of a model.

    `BatchState.kept` holds each row's last `BatchState.num_behind` tokens, in draft row i token t_{i+1}, with the
    features they are read with. Rows before these are read for good.

    num_steps  the most drafts that a step accepts, those of other drafters included
    """

    def __init__(self, model: DraftModules, num_modules: int, num_steps: int):
        self.model, self.num_modules, self.ahead = model, num_modules, num_modules
        self._num_open = num_modules - 1  # rows in which later modules read drafts
        self.num_rows = self.num_slots = self._num_open + num_steps + 1
        self.num_kept = self.num_rows + CATCH_UP_EVERY

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """See `Reader`. The last rows lack tokens of the next part, and are read again with it."""
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
        """See `Reader`."""
        return ModuleLevels(self, batch.state, batch.rows, self.num_rows, is_drafting=True)

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """See `Reader`. The modules read the accepted tokens when they draft next."""
        kept, count = self._drop_read(batch.state, batch.rows)
        place = count[:, None] + torch.arange(committed.tokens.shape[1], device=count.device)
        row = torch.arange(len(count), device=count.device)[:, None]
        kept.tokens[row, place] = committed.tokens.clamp(min=0)
        kept.features[row, place] = features.flatten(0, 1)[committed.hidden_rows]
        count.add_(committed.new_seq_lens - batch.lengths)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """See `Reader`."""
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


class ModuleLevels:
    """See `Levels`; levels of chains, K = 1. One module after the other reads the first `num_rows` kept rows.

    is_drafting  False: the modules read alone, and there are no logits
    """

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
        """See `Levels`."""
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
