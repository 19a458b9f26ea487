"""A step that was launched; the host reads its tokens later, on a GPU while the next step runs."""

from __future__ import annotations

from typing import Any

from ..batch.transfer import to_host
from ..step.phases import Mark, elapsed_ms, mark
from ..step.stepper import StepResult


class Launch:
    """Holds a result on its way to the host.

    rows    [(index, row)]: the rows that stepped, each with its index in the result's tensors
    number  the number of the runner that stepped; None: the result is the first token after a prompt
    start   the mark at which the step began; None: it is not timed
    prompt_tokens   rows of prompts that the step had beside its own
    """

    def __init__(
        self,
        result: StepResult,
        rows: list[tuple[int, Any]],
        number: int | None = None,
        start: Mark | None = None,
        prompt_tokens: int = 0,
    ):
        device = result.tokens.device
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            result = StepResult(*(None if tensor is None else to_host(tensor) for tensor in result))
        self.rows, self.number, self.prompt_tokens = rows, number, prompt_tokens
        self._result, self._start, self._end = result, start, mark(device)

    @property
    def is_done(self) -> bool:
        """Tells whether `read` would return without waiting."""
        return not self._is_gpu or self._end.query()

    @property
    def step_ms(self) -> float | None:
        """Returns the time that the step took, once it has been read; None if it is not timed."""
        return None if self._start is None else elapsed_ms(self._start, self._end)

    def read(self) -> list[tuple[Any, StepResult]]:
        """Waits for the step; returns each of `rows` with what it brought, as lists that begin with its tokens'."""
        if self._is_gpu:
            self._end.synchronize()
        tokens, *scores = (None if part is None else part.tolist() for part in self._result)
        return [
            (row, StepResult(_before_padding(tokens[index]), *(part and part[index] for part in scores)))
            for index, row in self.rows
        ]


def _before_padding(tokens: list[int]) -> list[int]:
    """Returns a row's tokens before the first -1."""
    return tokens[: tokens.index(-1)] if tokens[-1] < 0 else tokens
