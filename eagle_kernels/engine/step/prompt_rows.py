"""Parts of prompts that a step reads beside its own rows, in the same forward pass of the target.

Reading takes arithmetic and a step of few rows takes the bandwidth of the weights, so both together take hardly longer
than the longer one. The rows are of a fixed number, so that a step with them is a CUDA graph like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.kv_pool import RaggedAttend
from ..batch.state import BatchState

# of how many prompts a step reads a part at most
MOST_PARTS = 8


class Part(NamedTuple):
    """Holds a part of a prompt: `size` tokens from `start` on, in the request's pages.

    text  the part's tokens and the one after it, which the last part does not have
    """

    text: list[int]
    start: int
    size: int
    pages: list[int]


class PromptOutput(NamedTuple):
    """Holds what the target makes of the parts: logits [R, V] after each, features [1, P, F] or None."""

    logits: Tensor
    features: Tensor | None


class PromptRows:
    """Holds P rows for up to R parts, one part after another, in tensors that stay where they are.

    tokens, positions  [P]             of the rows; rows past the last part have position 0 and write no key
    texts              [P + R]         the parts' texts, one after another
    starts, lasts      [R]             where each part begins in its prompt, and the row of its last token
    bounds             [R + 1]         the rows where each part begins and ends
    held               all of these; zeros are no part
    output             of the last step with these rows
    """

    def __init__(self, num_tokens: int, state: BatchState):
        self.num_tokens, max_pages = num_tokens, state.block_table.shape[1]
        sizes = (num_tokens, num_tokens, num_tokens, num_tokens + MOST_PARTS, MOST_PARTS, MOST_PARTS, MOST_PARTS + 1)
        self.held = torch.zeros(sum(sizes) + MOST_PARTS * max_pages, dtype=torch.int64, device=state.lengths.device)
        *fields, tables = self.held.split([*sizes, MOST_PARTS * max_pages])
        self.tokens, self.positions, self._part_of, self.texts, self.starts, self.lasts, self.bounds = fields
        self._tables = tables.view(MOST_PARTS, max_pages)
        self._pool = state.target_pool
        self.output: PromptOutput | None = None

    def fill(self, parts: Sequence[Part]) -> None:
        """Writes the parts, at most R with at most P tokens; the host does not wait for the device."""
        options = {"dtype": torch.int64, "device": "cpu"}
        staged = torch.zeros(self.held.shape, **options, pin_memory=self.held.is_cuda)
        *fields, tables = staged.split([*(len(field) for field in self._fields), self._tables.numel()])
        stops = list(itertools.accumulate(part.size for part in parts))
        values = (
            [token for part in parts for token in part.text[: part.size]],
            [part.start + row for part in parts for row in range(part.size)],
            [number for number, part in enumerate(parts) for _ in range(part.size)],
            [token for part in parts for token in part.text],
            [part.start for part in parts],
            [stop - 1 for stop in stops],
            [0, *stops] + [stops[-1]] * (MOST_PARTS - len(parts)),
        )
        for field, numbers in zip(fields, values):
            field[: len(numbers)] = torch.tensor(numbers, **options)
        for table, part in zip(tables.view(self._tables.shape), parts):
            table[: len(part.pages)] = torch.tensor(part.pages, **options)
        self.held.copy_(staged, non_blocking=True)

    @property
    def _fields(self) -> tuple[Tensor, ...]:
        return self.tokens, self.positions, self._part_of, self.texts, self.starts, self.lasts, self.bounds

    def attend(self) -> RaggedAttend:
        """Returns the `attend` function of these rows."""
        page_size = self._pool.page_size
        pages = self._tables[self._part_of, self.positions // page_size]
        is_read = torch.arange(self.num_tokens, device=pages.device) < self.bounds[-1]
        slots = torch.where(is_read, pages * page_size + self.positions % page_size, -1)
        rows = slots[None], self.positions[None]
        return RaggedAttend(self._pool, self._tables, self.starts, self.bounds, *rows, self.num_tokens)
