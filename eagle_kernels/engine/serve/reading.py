"""Which parts of prompts are read next, by themselves or beside a step, and how the target reads them."""

import logging
import math
from collections import deque
from collections.abc import Sequence

from torch import device as Device

from ..batch.prefix_cache import Prefix
from ..batch.state import BatchState
from ..requests.request import Request
from ..step.choice import FREE_ROWS
from ..step.packed_rows import MOST_PARTS, Part, PromptRows
from ..step.phases import Mark, elapsed_ms, mark
from ..step.plan import StepPlan
from .prompts import ReadPart, Row, read_parts

# The budgets of prompts that are read by themselves are multiples of this.
UNIT_TOKENS = 64
# A budget grows by no more than this factor at once, since what it was measured by may have been short.
GROWTH = 2
# How many readings a budget that took too long is left out for.
REMEMBERED = 16
# The weight of a new step time in the mean.
TIME_WEIGHT = 0.25
_logger = logging.getLogger(__name__)
# Tokens of prompts that a step reads beside its own rows. Each of these has graphs of its own; all but the last are for
# steps whose time is limited.
JOINT_TOKENS = (64, 192)
# This number of steps ends before a pass of its own would, which takes tens of milliseconds for any prompt.
FEW_STEPS = 4


class Pace:
    """Chooses the budget of the next step from the times of the steps and of the reading so far.

    The budget is scaled by how much of the allowed time the tokens took that were read last, and grows a little as long
    as they fit: short readings take about as long as one token. So it follows whatever changes: longer contexts, other
    batches, another card.

    max_step_ms  None: the largest budget always
    budgets      to choose from, ascending; the least one is read whatever it takes, so that no prompt waits for ever
    """

    def __init__(self, max_step_ms: float | None, budgets: Sequence[int], device: Device):
        self._max_step_ms, self._budgets, self._device = max_step_ms, budgets, device
        self._tokens, self._step_ms = budgets[0], 0.0
        # a budget that took too long, and readings since that did not
        self._too_many, self._num_fitting = budgets[-1] + 1, 0
        self._unread: deque[tuple[Mark, Mark, int, bool]] = deque()

    @property
    def is_limited(self) -> bool:
        return self._max_step_ms is not None

    def budget(self) -> int:
        """Returns how many tokens may be read now, beside others that wait for their next step meanwhile."""
        while self._unread and (isinstance(self._unread[0][1], float) or self._unread[0][1].query()):
            start, end, tokens, is_joint = self._unread.popleft()
            self._note_reading(tokens, elapsed_ms(start, end) - (self._step_ms if is_joint else 0.0))
        return self._tokens if self.is_limited else self._budgets[-1]

    def begin(self) -> Mark | None:
        """Returns the mark that `end` takes, before prompts are read."""
        return mark(self._device) if self.is_limited else None

    def end(self, start: Mark | None, tokens: int, *, is_joint: bool = False) -> None:
        """Notes that `tokens` have been read since `start`, is_joint: in a step; the device may still be at it."""
        if self.is_limited and start is not None and tokens:
            self._unread.append((start, mark(self._device), tokens, is_joint))

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


class Reading:
    """Chooses parts of prompts for the steps of a plan, and reads those that no step reads.

    shares_prefixes  whether prompts are read only from where they part
    rows          `PromptRows` by their number of rows; all plans share them, since graphs name their tensors
    takes_several whether the draft reads several parts at once; as with `is_joint`, what fails is not tried again
    is_joint      whether steps read prompts beside their own rows; what fails only there is not tried again
    pace          how many tokens there is time for
    """

    def __init__(self, plan: StepPlan, state: BatchState, max_step_ms: float | None, rows: dict[int, PromptRows]):
        self._plan, self._state, self._rows = plan, state, rows
        self._prefill_chunk = plan.plain.config.prefill_chunk
        self._max_step_ms, self._reads_several = max_step_ms, plan.plain.reads_several
        self.shares_prefixes = self.takes_several = True
        # `on_tree` would see the tree twice if the prompts beside it failed
        self.is_joint = self._reads_several and plan.plain.on_tree is None
        self.pace = self._new_pace()

    def _new_pace(self) -> Pace:
        chunk = self._prefill_chunk
        sizes = JOINT_TOKENS if self.is_joint else [*range(UNIT_TOKENS, chunk, UNIT_TOKENS), chunk]
        return Pace(self._max_step_ms, sorted({min(size, chunk) for size in sizes}), self._state.lengths.device)

    def prefix(self, request: Request) -> Prefix:
        """Returns what the request may share of its prompt."""
        if not self.shares_prefixes:
            return Prefix(())
        readers, first, prompt = self._plan.readers, request.params.logprob_start_len, request.prompt
        most = len(prompt) if first is None else max(first, 1) - 1  # from there on logits are wanted
        ahead, unit = max((each.reader.ahead for each in readers), default=0), 1
        is_deterministic = self._plan.plain.config.deterministic
        if is_deterministic:  # bits depend on where prompts are cut: whole chunks have the same in all of them
            unit, past = math.lcm(self._prefill_chunk, self._state.target_pool.page_size), max(ahead, 1)
            prompt = prompt[: (len(prompt) - past) // unit * unit + past]
        kind = is_deterministic, *((each.number, type(each.reader), each.reader.ahead) for each in readers)
        return Prefix(prompt, kind, ahead, most - most % unit, unit)

    @property
    def _joint_sizes(self) -> list[int]:
        """Returns the numbers of rows of prompts that steps have beside their own."""
        most = next((size for size in JOINT_TOKENS if size >= self._prefill_chunk), JOINT_TOKENS[-1])
        return [size for size in JOINT_TOKENS if size <= most] if self.pace.is_limited else [most]

    def joint_size(self, parts: Sequence[tuple[Row, int]]) -> int:
        """Returns the number of rows in which these parts have room; 0 without any."""
        num_tokens = sum(size for _, size in parts)
        return next(size for size in (0, *self._joint_sizes) if size >= num_tokens)

    def is_in_step(self, unread: Sequence[Row], num_rows: int) -> bool:
        """Returns whether the next step, of about num_rows rows, should read prompts as well.
        Without a limit of its time: what a few steps can read, and one long prompt, for which all others would wait,
        where its rows cost little. Several that join are there sooner by themselves; where they join faster than steps
        can read, they would wait in a queue that never ends."""
        size, num_tokens = self._joint_sizes[-1], sum(len(row.request.prompt) - row.num_read for row in unread)
        is_cheap = num_tokens <= FEW_STEPS * min(size, self._prefill_chunk) and len(unread) <= FEW_STEPS * MOST_PARTS
        is_cheap |= len(unread) == 1 and num_rows + size <= FREE_ROWS
        if unread and _is_scored(min(unread, key=lambda row: row.number)):
            return False
        return self.is_joint and (self.pace.is_limited or is_cheap)

    def next_parts(self, unread: Sequence[Row], is_beside: bool, is_in_step: bool) -> list[tuple[Row, int]]:
        """Returns the rows whose prompts are read now, the oldest first, each with the number of its tokens.
        Where each is read by itself, it is cut at multiples of prefill_chunk, whatever else is read: bits depend on
        where it is cut. is_beside: whether others wait for their next step. is_in_step: that step reads them."""
        is_paced = is_in_step or is_beside and self.pace.is_limited
        budget, parts = self.pace.budget() if is_paced else self._prefill_chunk, []
        most_parts = MOST_PARTS if is_in_step else len(unread)
        unread = [row for row in unread if not (is_in_step and _is_scored(row))]
        for row in sorted(unread, key=lambda row: row.number)[:most_parts]:  # so that the oldest always fits
            is_cut = is_in_step or self._reads_several or self.pace.is_limited
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
            prompts = self._kept_rows(self.joint_size(parts))
        else:
            prompts = PromptRows(sum(size for _, size in parts), self._state)
        prompts.fill([Part(row.text(size), row.num_read, size, row.pages.ids) for row, size in parts])
        return prompts

    def rows_in_use(self) -> list[PromptRows]:
        """Returns the rows of prompts with which steps are compiled or captured."""
        if not self.is_joint:
            return []
        if not self._plan.runners[0].uses_graphs:
            return [PromptRows(JOINT_TOKENS[0] if self._state.lengths.is_cuda else 1, self._state)]
        return [self._kept_rows(size) for size in self._joint_sizes]

    def _kept_rows(self, size: int) -> PromptRows:
        if size not in self._rows:
            self._rows[size] = PromptRows(size, self._state)
        return self._rows[size]

    def read(self, parts: Sequence[tuple[Row, int]]) -> list[ReadPart] | None:
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

    def note_failure(self, num_read: Sequence[int], of: str) -> None:
        """Notes how much could be read one by one of what a "step", "target" or "draft" failed to read together."""
        if all(num_read):  # it would fail again
            self._reads_several &= of != "target"
            self.takes_several &= of != "draft"
            if of == "step":
                self.give_up_steps()

    def give_up_steps(self) -> None:
        """Lets no step read prompts any more."""
        self.is_joint = False
        self.pace = self._new_pace()

    def warn(self, parts: Sequence[tuple[Row, int]], how: str, error: Exception) -> None:
        """Logs that these parts could not be read together."""
        # an error that a log keeps would hold all that it passed
        reason = f"{type(error).__name__}: {error}"
        _logger.warning("EAGLEInference: %d prompts could not be read %s: %s", len(parts), how, reason)


def _is_scored(row: Row) -> bool:
    """Returns whether a prompt's own tokens are scored: a step has logits after parts alone, so it cannot read them."""
    return row.request.params.logprob_start_len is not None
