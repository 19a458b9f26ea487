"""What a step asks of whatever makes its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ... import ops
from ..batch import Batch, Committed
from ..batch_state import BatchState
from ..models.protocol import DraftModel


class Proposal(NamedTuple):
    """tree: of N = `num_nodes` nodes for each row; nodes that are linked to nothing are padding.

    draft_logits     [B * N, Vd]  of drafts that were drawn: what the children of each node were drawn from, at the
                                  request's temperature, without replacement; None: drafts were chosen
    draft_to_target  [Vd]         of these, as `DraftModel` has it
    """

    tree: ops.BuildTreeOutput
    draft_logits: Tensor | None = None
    draft_to_target: Tensor | None = None


class Drafter(Protocol):
    """Proposes a chain or a tree for each row of a batch, and learns what became of it.

    `propose` and `observe` are parts of a step: they wait for nothing, allocate nothing by data, and may be
    captured in a CUDA graph. What a row was before is forgotten with `read_prompt`.

    num_steps      deepest draft, so the most that a step accepts
    num_nodes      nodes that a step verifies, root included; 1: no drafts
    num_slots      slots behind a row's committed tokens that drafting and verification may write, in either pool
    model          what reads every committed token into the batch's second pool; None: nothing does
    reads_history  whether it reads `BatchState.history`
    """

    num_steps: int
    num_nodes: int
    num_slots: int
    model: DraftModel | None
    reads_history: bool

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

    def propose(self, batch: Batch) -> Proposal:
        """A tree for each row, within `num_nodes` nodes."""
        ...

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """What was accepted, and the target's features [B, N, F] of all nodes."""
        ...


def aux_layers(drafter: Drafter | None) -> Sequence[int]:
    """The target's streams that a drafter's model reads."""
    return () if drafter is None or drafter.model is None else drafter.model.aux_layers


def overshoot(drafter: Drafter) -> int:
    """Slots that a request may need past its last token: what a step brings beyond it, the step that runs before the
    host knows of the end, and what steps write behind the committed tokens."""
    return 2 * (drafter.num_steps + 1) + drafter.num_slots
