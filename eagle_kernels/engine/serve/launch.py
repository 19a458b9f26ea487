"""A step that was launched, whose tokens the host reads later: on a GPU while the next one runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..step.phases import mark
from ..step.stepper import StepResult


class Launch:
    """A result on its way to the host.

    rows    [(index, row)]: the rows that stepped, and where in the tensors each stood then
    number  of the runner that stepped; None: the first token of a prompt
    """

    def __init__(self, result: StepResult, rows: list[tuple[int, Any]], number: int | None):
        device = result.tokens.device
        if device.type == "cuda":
            result = StepResult(*(None if tensor is None else _to_host(tensor) for tensor in result))
        self.rows, self.number, self.step_ms = rows, number, None
        self._result, self._end = result, mark(device) if device.type == "cuda" else None
        self._start: torch.cuda.Event | None = None

    def timed_from(self, start: torch.cuda.Event | None, start_s: float, end_s: float) -> None:
        """Times the step from an event on a GPU, else by the host's clock."""
        self._start, self.step_ms = start, 1e3 * (end_s - start_s) if start is None else None

    @property
    def is_done(self) -> bool:
        """Whether `read` would wait for nothing."""
        return self._end is None or self._end.query()

    def read(self) -> list[tuple[Any, list[int], list[float] | None, list[float] | None]]:
        """Waits for the step; returns each of `rows` with its tokens, their log-probabilities and the raw ones."""
        if self._end is not None:
            self._end.synchronize()
        if self._start is not None:
            self.step_ms = self._start.elapsed_time(self._end)
        tokens, logprobs, raw_logprobs = (None if part is None else part.tolist() for part in self._result)
        return [
            (row, _before_padding(tokens[index]), logprobs and logprobs[index], raw_logprobs and raw_logprobs[index])
            for index, row in self.rows
        ]


def _before_padding(tokens: list[int]) -> list[int]:
    """Returns the tokens of a row before the first -1."""
    return tokens[: tokens.index(-1)] if tokens[-1] < 0 else tokens


def _to_host(tensor: Tensor) -> Tensor:
    """Queues a copy to pinned memory and returns it.

    That memory is not new at each step: PyTorch's caching allocator for the host notes the stream of the copy, and
    hands a freed block out again once the stream has passed it.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
