"""Next-token modules, one for each level of a chain (DeepSeek-V3, arXiv 2412.19437, section 2.2), read the text.

Module k = 1 .. M reads, in row i, what module k - 1 made of row i (the first one: the target's feature of t_i) beside
token t_{i+k}, attends to its own rows before, and predicts t_{i+k+1}.

For a request with n committed tokens t_0 .. t_{n-1} and root t_n the rows are 0 .. n - 1, at positions and slots of the
same number. In the last row module k says which token is draft number k. It reads draft k - 1 there, and drafts in the
k - 2 rows before. So rows from n - M + 1 on are read again when it is known what was accepted, by all modules: their
tokens and features are kept from step to step, with those that the last step brought.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ..batch.batch import Batch, Committed
from ..batch.kv_pool import PrefillAttend, TreeAttend
from ..batch.state import CATCH_UP_EVERY, BatchState, Kept
from ..models.protocol import DraftModules


class ModuleReader:
    """The first `num_modules` modules of a model, two at least.

    In `BatchState.kept` are each row's last `BatchState.num_behind` tokens, in draft row i token t_{i+1}, with the
    features beside them. Rows before these are read for good.

    num_steps  the most drafts that a step accepts, others than its own included
    """

    def __init__(self, model: DraftModules, num_modules: int, num_steps: int):
        self.model, self.num_modules = model, num_modules
        self._num_open = num_modules - 1  # rows whose later modules read drafts
        self.num_rows = self._num_open + num_steps + 1
        self.num_slots = self.num_rows
        self.num_kept = self.num_rows + CATCH_UP_EVERY

    def read_prompt(
        self,
        state: BatchState,
        row: int,
        block_table: Tensor,
        tokens: Tensor,
        features: Tensor,
        start: int,
        num_prompt: int,
    ) -> None:
        """See `Reader`. The last rows of a part lack tokens of the next one, with which they are read again."""
        kept, first = state.kept[self.num_kept], max(start - self._num_open, 0)
        held = start - first
        tokens = torch.cat([kept.tokens[row, :held], tokens[1:]])
        features = torch.cat([kept.features[None, row, :held], features], dim=1)
        count = len(tokens)
        positions = torch.arange(first, first + count, device=tokens.device)[None]
        attend = PrefillAttend(state.draft_pool, block_table, first, count)
        ahead, hidden = torch.cat([tokens, tokens.new_zeros(self._num_open)])[None], features
        for module in range(self.num_modules):
            hidden = self.model.advance(ahead[:, module : module + count], hidden, positions, attend, module=module)
        left = min(count, self._num_open)
        kept.tokens[row, :left] = tokens[count - left :]
        kept.features[row, :left] = features[0, count - left :]
        state.num_behind[row] = left

    def levels(self, batch: Batch) -> ModuleLevels:
        """See `Reader`."""
        return ModuleLevels(_Rows(self, batch.state, batch.rows, self.num_rows))

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """See `Reader`; the modules read it when they draft next."""
        brought = Kept(committed.tokens.clamp(min=0), features.flatten(0, 1)[committed.hidden_rows])
        self._push(batch.state, batch.rows, brought, committed.new_seq_lens - batch.lengths)

    def keep(self, batch: Batch, roots: Tensor, features: Tensor) -> None:
        """See `Reader`."""
        batch.state.keep(batch.rows, self.num_kept, roots, features)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """See `Reader`."""
        rows = slice(0, num_rows)
        _Rows(self, state, rows, self.num_kept).read_all()
        self._push(state, rows, None, 0)

    def _push(self, state: BatchState, rows: slice, brought: Kept | None, num_brought: Tensor | int) -> None:
        """Leaves of what is kept the rows that are not read for good, and puts the first `num_brought` behind them."""
        kept, count = state.kept[self.num_kept], state.num_behind[rows]
        left = count.clamp(max=self._num_open)
        place = torch.arange(self._num_open, device=count.device)
        held = Kept(*(_rows_of(tensor[rows], (count - left)[:, None] + place) for tensor in kept))
        if brought is not None:
            held = Kept(*(torch.cat(pair, dim=1) for pair in zip(held, brought)))
            place = torch.arange(held.tokens.shape[1], device=count.device)
            skipped = torch.where(place < left[:, None], 0, self._num_open - left[:, None])
            held = Kept(*(_rows_of(tensor, place + skipped) for tensor in held))
        for tensor, new in zip(kept, held):
            tensor[rows, : new.shape[1]] = new
        count.copy_(left + num_brought)


class ModuleLevels:
    """See `Levels`; of chains, K = 1."""

    def __init__(self, rows: _Rows):
        self._rows = rows
        self.logits = rows.read_and_predict()

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        """See `Levels`."""
        self._rows.append(depth - 1, tokens)
        return self._rows.read_and_predict()

    def finish(self, num_levels: int) -> None:
        """The modules that have not drafted read all the same: other steps may draft with them."""
        self._rows.read_all()


class _Rows:
    """The first `num_rows` of the rows that are kept, which one module after the other reads."""

    def __init__(self, reader: ModuleReader, state: BatchState, rows: slice, num_rows: int):
        self._model, self._left, self._num_rows = reader.model, list(range(reader.num_modules)), num_rows
        pool, kept = state.draft_pool, state.kept[reader.num_kept]
        self._count, table = state.num_behind[rows], state.block_table[rows]
        # a row whose prompt is being read has no length yet
        first = (state.lengths[rows] - self._count).clamp(min=0)
        slots, self._positions = ops.find_slots(
            table, first, count=num_rows, page_size=pool.page_size, max_length=self._model.max_length
        )
        # rows past those that are kept are padding that only later rows see, in slots that hold nothing yet
        self._attend = TreeAttend(pool, table, first, slots, num_rows, None, self._positions)
        tokens = kept.tokens[rows, :num_rows]
        self._tokens = torch.cat([tokens, tokens.new_zeros(len(tokens), reader.num_modules)], dim=1)
        self._hidden = kept.features[rows, :num_rows]

    def append(self, place: int, tokens: Tensor) -> None:
        """Drafts [B, 1], so many places behind the root."""
        self._tokens.scatter_(1, self._count[:, None] + place, tokens)

    def read(self) -> None:
        """By the next module, to which row j holds the token `module` places further on."""
        module = self._left.pop(0)
        tokens = self._tokens[:, module : module + self._num_rows]
        self._hidden = self._model.advance(tokens, self._hidden, self._positions, self._attend, module=module)

    def read_and_predict(self) -> Tensor:
        """Logits [B, Vd] of the next module in the last rows."""
        self.read()
        last = (self._count - 1).clamp(min=0)[:, None]
        return self._model.project(_rows_of(self._hidden, last))[:, 0]

    def read_all(self) -> None:
        """By all modules that are left."""
        while self._left:
            self.read()


def _rows_of(tensor: Tensor, places: Tensor) -> Tensor:
    """[B, T, ..] of tensor [B, C, ..] at places [B, T], those outside being anyone's."""
    batch = torch.arange(len(tensor), device=tensor.device)[:, None]
    return tensor[batch, places.clamp(0, tensor.shape[1] - 1)]
