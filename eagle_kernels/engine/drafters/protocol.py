"""What a step asks of whatever makes its drafts, and of whatever reads the text for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ... import ops
from ..batch.batch import Batch, Committed
from ..batch.state import BatchState
from ..models.protocol import DraftModel


class Proposal(NamedTuple):
    """tree: of N = `num_nodes` nodes for each row; nodes that are linked to nothing are padding.

    draft_logits     [B * N, Vd]  of drafts that were drawn: what the children of each node were drawn from, at the
                                  request's temperature, without replacement; None: drafts were chosen. The tree of
                                  drafts that were drawn has one shape in all steps: `SampledDrafter` says why
    draft_to_target  [Vd]         of these, as `DraftModel` has it
    path_probs       () -> [B, N - 1] fp32: how probable the drafter finds each draft with all those above it, as
                                  EAGLE-2 scores it; NaN where it does not know. Computed for whoever asks, within the
                                  step; None: it knows of none
    """

    tree: ops.BuildTreeOutput
    draft_logits: Tensor | None = None
    draft_to_target: Tensor | None = None
    path_probs: Callable[[], Tensor] | None = None


class Drafter(Protocol):
    """Proposes a chain or a tree for each row of a batch.

    What was accepted it finds in `BatchState.history`, or its `reader` has read it. `propose` is part of a step, as are
    the reader's methods but `read_prompt`: they wait for nothing, allocate nothing by data, and may be captured in a
    CUDA graph.

    num_steps      deepest draft, so the most that a step accepts
    num_nodes      nodes that a step verifies, root included; 1: no drafts
    num_slots      slots behind a row's committed tokens that drafting and verification may write, in either pool
    reader         of its model; None: it has none
    reads_history  whether it reads `BatchState.history`
    """

    num_steps: int
    num_nodes: int
    num_slots: int
    reader: Reader | None
    reads_history: bool

    def propose(self, batch: Batch) -> Proposal:
        """A tree for each row, within `num_nodes` nodes."""
        ...


class Reader(Protocol):
    """Reads every committed token into the batch's second pool, with a draft model, and computes levels of drafts.

    All drafters of a batch share one. While plain steps go on it rests: they keep for it what it misses (`keep`), and
    it reads that when it is wanted again (`catch_up`). What a row was before is forgotten with `read_prompt`.

    num_slots  slots behind a row's committed tokens that it may write
    num_kept   tokens of a row, with the target's features, that it may keep from step to step in `BatchState.kept`
    """

    model: DraftModel
    num_slots: int
    num_kept: int

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
        """A part of a prompt of num_prompt tokens, from token `start` on.

        block_table  [1, max_pages]  of the row, which is in the batch only once its prompt is read
        tokens       [P + 1]         of the part, and the one behind it, which after the last part is the row's root
        features     [1, P, F]       the target's features beside the P tokens; None where the model reads none
        """
        ...

    def levels(self, batch: Batch) -> Levels:
        """Of a step, from its roots on."""
        ...

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """What was accepted, and the target's features [B, N, F] of all nodes."""
        ...

    def keep(self, batch: Batch, roots: Tensor, features: Tensor) -> None:
        """For `catch_up`: the new roots [B] of a plain step and, beside each, the feature [B, 1, F] of the token
        before it."""
        ...

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept for it of the first `num_rows` rows.

        is_wanted: its drafts are wanted next. Else a plain step follows, and it reads that one before they are.
        """
        ...


class Levels(Protocol):
    """logits [B, Vd]: of what may follow the roots."""

    logits: Tensor

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        """Logits [B * K, Vd] of what may follow the drafts of level depth - 1, for depth = 1, 2, ..

        tokens     [B, K]
        ancestors  [B * K, W]  packed words of the slots that each sees, of all levels so far, K a level
        parents    [B, K]      flat rows that this level's drafts come from; None: each follows the one in its place
        """
        ...

    def finish(self, num_levels: int) -> None:
        """No more than these: what has to be read all the same."""
        ...


def overshoot(drafter: Drafter) -> int:
    """Slots that a request may need past its last token: what a step brings beyond it, the step that runs before the
    host knows of the end, and what steps write behind the committed tokens."""
    return 2 * (drafter.num_steps + 1) + drafter.num_slots
