"""Which parts of prompts are read next, by themselves or beside a step, and how the target reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..batch.state import BatchState
from ..step.phases import Mark
from ..step.plan import StepPlan
from ..step.prompt_rows import MOST_PARTS, PromptRows
from .pace import UNIT_TOKENS, Pace
from .prompts import PartOutput, Row, fill_rows, read_parts

_logger = logging.getLogger(__name__)

# Tokens of prompts that a step reads beside its own rows. Each of these has graphs of its own; all but the last are for
# steps whose time is limited. Up to 256 rows, those of the step included, take little longer than one.
JOINT_TOKENS = (64, 192)


def joint_size(parts: Sequence[tuple[Row, int]]) -> int:
    """Returns the rows of a graph in which these parts have room; 0 without any."""
    num_tokens = sum(size for _, size in parts)
    return next(size for size in (0, *JOINT_TOKENS) if size >= num_tokens)


class Reading:
    """Reads prompts for the steps of a plan.

    rows          for the prompts of steps, by their number; they stay whatever the plan
    is_joint      whether prompts are read beside the rows of a step; what fails only there is not tried again
    pace          the time that there is for prompts
    """

    def __init__(
        self,
        plan: StepPlan,
        state: BatchState,
        prefill_chunk: int,
        max_step_ms: float | None,
        rows: dict[int, PromptRows],
    ):
        self._plan, self._state, self._prefill_chunk, self._rows = plan, state, prefill_chunk, rows
        self._reads_several = self.is_joint = plan.plain.reads_several
        sizes = JOINT_TOKENS if self.is_joint else [*range(UNIT_TOKENS, prefill_chunk, UNIT_TOKENS), prefill_chunk]
        self.pace = Pace(max_step_ms, sorted({min(size, prefill_chunk) for size in sizes}))

    def is_in_step(self, num_unread: int, num_running: int) -> bool:
        """Returns whether the next step should read prompts as well.

        Without a limit of its time, not if fewer run than are to be read: such steps bring few tokens, and whole
        prompts read by themselves are there sooner.
        """
        return self.is_joint and (self.pace.is_limited or num_running >= num_unread)

    def next_parts(self, unread: Sequence[Row], is_beside: bool, is_in_step: bool) -> list[tuple[Row, int]]:
        """Returns the rows whose prompts are read now, the oldest first, each with the number of its tokens.

        Where each is read by itself, it is cut at multiples of prefill_chunk, whatever else is read: bits depend on
        where it is cut. is_beside: whether others wait for their next step meanwhile, which may read these parts.
        """
        is_paced = is_in_step or is_beside and self.pace.is_limited
        budget, parts = self.pace.budget() if is_paced else self._prefill_chunk, []
        most_parts = MOST_PARTS if is_in_step else len(unread)
        for row in sorted(unread, key=lambda row: row.number)[:most_parts]:  # so that the oldest always fits
            is_cut = self._reads_several or self.pace.is_limited
            size = min(len(row.request.prompt) - row.num_read, budget if is_cut else self._prefill_chunk)
            if 0 < size <= budget:
                parts.append((row, size))
                budget -= size
        return parts

    def rows_for(self, parts: Sequence[tuple[Row, int]]) -> PromptRows | None:
        """Returns rows that hold these parts, with graphs always the same ones; None without any part."""
        if not parts:
            return None
        if self._plan.runners[0].uses_graphs:
            prompts = self._kept_rows(joint_size(parts))
        else:
            prompts = PromptRows(sum(size for _, size in parts), self._state)
        fill_rows(prompts, parts)
        return prompts

    def rows_in_use(self) -> list[PromptRows]:
        """Returns the rows of prompts with which steps are compiled or captured."""
        if not self.is_joint:
            return []
        if not self._plan.runners[0].uses_graphs:
            return [PromptRows(JOINT_TOKENS[0] if self._state.lengths.is_cuda else 1, self._state)]
        return [self._kept_rows(size) for size in (JOINT_TOKENS if self.pace.is_limited else JOINT_TOKENS[-1:])]

    def _kept_rows(self, size: int) -> PromptRows:
        if size not in self._rows:
            self._rows[size] = PromptRows(size, self._state)
        return self._rows[size]

    def read(self, parts: Sequence[tuple[Row, int]]) -> list[PartOutput] | None:
        """Reads parts by themselves, all in one pass; None if they have to be read one by one."""
        if len(parts) > 1 and not self._reads_several:
            return None
        try:
            return read_parts(self._plan.plain, self._state, parts)
        except Exception as error:  # one of them may be to blame
            if len(parts) == 1:
                raise
            self.warn(parts, "at once", error)
            return None

    def note_failure(self, num_read: Sequence[int], in_a_step: bool) -> None:
        """Notes how much could be read one by one of what failed together: all of it would fail again."""
        if all(num_read):
            self.is_joint &= not in_a_step
            self._reads_several &= in_a_step

    def warn(self, parts: Sequence[tuple[Row, int]], how: str, error: Exception) -> None:
        # an error that a log keeps would hold all that it passed
        reason = f"{type(error).__name__}: {error}"
        _logger.warning("EAGLEInference: %d prompts could not be read %s: %s", len(parts), how, reason)

    def begin(self) -> Mark | None:
        """Returns the mark that `end` takes, before prompts are read."""
        return self.pace.begin(self._state.lengths.device)

    def end(self, start: Mark | None, num_read: int, is_joint: bool = False) -> None:
        """Notes that so many tokens have been read since `start`, is_joint: in a step."""
        self.pace.end(start, num_read, self._state.lengths.device, is_joint=is_joint)
