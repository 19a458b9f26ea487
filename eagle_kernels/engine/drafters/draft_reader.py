"""One of the draft models of a batch: its reader, and what is its own of the rows and of the target's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..batch.state import Batch, BatchState, Committed
from ..config.eagle_config import EAGLEConfig
from .protocol import PromptPart, Reader


class DraftReader(NamedTuple):
    """Lets a reader read as one of several, which pause in steps whose drafts are not theirs."""

    reader: Reader
    number: int  # of its state in `BatchState.drafts`
    columns: slice  # of the target's features
    room: int  # most tokens of a row that it misses before it reads them
    config: EAGLEConfig  # with the trees that its model can draft

    def of(self, features: Tensor) -> Tensor:
        """Returns its columns of the target's features [.., F]."""
        return features[..., self.columns]

    def make_room(self, state: BatchState) -> None:
        """Makes room for what is kept for it."""
        state.drafts[self.number].make_room(self.reader.num_kept, self.columns.stop - self.columns.start)

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Reads parts of prompts, whose features are those of all readers."""
        if parts[0].features is not None:
            reads = self.columns.stop > self.columns.start
            parts = [part._replace(features=self.of(part.features) if reads else None) for part in parts]
        self.reader.read_prompts(state.drafts[self.number], parts)

    def keep(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Keeps what a step brought in which it paused, with the target's features [B, N, F] of all nodes."""
        state, num_new = batch.state.drafts[self.number], committed.new_seq_lens - batch.lengths
        own = self.of(features).flatten(0, 1)[committed.hidden_rows]
        state.keep(batch.rows, self.reader.num_kept, committed.tokens, own, num_new)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept; see `Reader.catch_up`."""
        self.reader.catch_up(state.drafts[self.number], num_rows, is_wanted)
