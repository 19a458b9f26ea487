"""The rows of one step, and the verdict on their drafts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ... import ops
from ..requests.sampling_params import Features
from .state import BatchState


class Committed(NamedTuple):
    """Holds the verdict of any verification op and what follows from it; see `ops.verify_commit`."""

    accept_index: Tensor
    accept_token_num: Tensor
    new_seq_lens: Tensor
    bonus_tokens: Tensor
    tokens: Tensor
    hidden_rows: Tensor
    last_row: Tensor
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


class Batch:
    """Holds the rows of a step, and where their new keys go.

    slots      [B, M] int64  of the M = num_slots tokens after the committed ones, in either pool
    positions  [B, M] int64  of these tokens, none above what the draft was made for; None without its max_length
    """

    def __init__(self, state: BatchState, rows: slice, num_slots: int, max_length: int | None):
        self.state, self.rows = state, rows
        self.lengths, self.roots, self.is_live = state.lengths[rows], state.roots[rows], state.is_live[rows]
        self.block_table, self.seeds = state.block_table[rows], state.sampling.seeds[rows]
        page_size = state.target_pool.page_size
        self.slots, self.positions = ops.find_slots(
            self.block_table, self.lengths, count=num_slots, page_size=page_size, max_length=max_length
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def numbers(self, name: str) -> Tensor:
        """Returns [B] values of a field of `SamplingParams`."""
        return self.state.sampling.numbers[name][self.rows]

    def sampling_arguments(self, features: Features) -> dict[str, Tensor]:
        return self.state.sampling.arguments(features, self.rows)
