"""How many tokens of prompts a step has time for, where a step must not take longer than the user allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import device as Device

from ..step.phases import Mark, elapsed_ms, mark

# The budgets of prompts that are read by themselves are multiples of this.
UNIT_TOKENS = 64
# A budget grows by no more than this factor at once, since what it was measured by may have been short.
GROWTH = 2
# How many readings a budget that took too long is left out for.
REMEMBERED = 16
# The weight of a new step time in the mean.
TIME_WEIGHT = 0.25


class Pace:
    """Chooses the budget of the next step from the times of the steps and of the reading so far.

    The budget is scaled by how much of the allowed time the tokens took that were read last, and grows a little as long
    as they fit: short readings take about as long as one token. So it follows whatever changes: longer contexts, other
    batches, another card.

    max_step_ms  None: the largest budget always
    budgets      to choose from, ascending; the least one is read whatever it takes, so that no prompt waits for ever
    """

    def __init__(self, max_step_ms: float | None, budgets: Sequence[int]):
        self._max_step_ms, self._budgets = max_step_ms, budgets
        self._tokens, self._step_ms = budgets[0], 0.0
        # a budget that took too long, and readings since that did not
        self._too_many, self._num_fitting = budgets[-1] + 1, 0
        self._unread: deque[tuple[Mark, Mark, int, bool]] = deque()

    @property
    def is_limited(self) -> bool:
        return self._max_step_ms is not None

    def budget(self) -> int:
        """Returns how many tokens may be read now, beside others that wait for their next step meanwhile."""
        while self._unread and _is_over(self._unread[0][1]):
            start, end, tokens, is_joint = self._unread.popleft()
            self._note_reading(tokens, elapsed_ms(start, end) - (self._step_ms if is_joint else 0.0))
        return self._tokens if self.is_limited else self._budgets[-1]

    def begin(self, device: Device) -> Mark | None:
        """Returns the mark that `end` takes, before prompts are read."""
        return mark(device) if self.is_limited else None

    def end(self, start: Mark | None, tokens: int, device: Device, *, is_joint: bool = False) -> None:
        """Notes that `tokens` have been read since `start`, is_joint: in a step; the device may still be at it."""
        if self.is_limited and start is not None and tokens:
            self._unread.append((start, mark(device), tokens, is_joint))

    def note_step(self, step_ms: float | None) -> None:
        """Notes the time of a step that read nothing; None: it was not measured."""
        if step_ms is not None:
            self._step_ms += (TIME_WEIGHT if self._step_ms else 1.0) * (step_ms - self._step_ms)

    def _note_reading(self, tokens: int, read_ms: float) -> None:
        allowed_ms = self._max_step_ms - self._step_ms
        if read_ms <= allowed_ms and 2 * tokens < self._tokens:
            return  # the rest of a prompt, which says little of the time of a whole budget
        wanted = tokens * allowed_ms / max(read_ms, 1e-3)
        if read_ms > allowed_ms:
            self._too_many, self._num_fitting = tokens, 0
        else:
            wanted = min(wanted, GROWTH * max(tokens, self._tokens))
            wanted = max(wanted, next((budget for budget in self._budgets if budget > tokens), tokens))
            self._num_fitting += 1
            if self._num_fitting > REMEMBERED:
                self._too_many = self._budgets[-1] + 1
            wanted = max(min(wanted, self._too_many - 1), tokens)
        self._tokens = next((budget for budget in reversed(self._budgets) if budget <= wanted), self._budgets[0])


def _is_over(end: Mark) -> bool:
    return isinstance(end, float) or end.query()
