"""What plain decoding would take, for `GenerationStats.speedup`: a plain step is timed when somebody asks for it."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ...runtime import check
from ...runtime.values import first_line
from ..requests.request import Request
from ..requests.sampling_params import Features
from .scheduler import Scheduler

_logger = logging.getLogger(__name__)


class PlainSteps:
    """Holds the times of plain steps by number of requests.
    known_ms: those of steps that compiled nothing; None: timing it failed.
    untimed: functions that time a step, for when somebody asks."""

    def __init__(self) -> None:
        self.known_ms: dict[int, float | None] = {}
        self.untimed: dict[int, Callable[[], float]] = {}

    def note(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        """Keeps what a plain step of these requests is timed with, as they are now that their prompts have been read.
        Nothing if that is known, others run beside them, some cannot step, or somebody looks at every step."""
        rows, runner, state = scheduler.stepping, scheduler.plan.runners[0], scheduler.state
        count, is_full = len(requests), len(rows) == min(len(requests), state.num_rows)
        if check.DEBUG:  # a step waits for checks, and the timed one has no page for its own keys
            return
        if count in self.known_ms or count in self.untimed or not is_full:
            return
        if not scheduler.runs_beside(requests) and runner.stepper.on_tree is None:
            num_rows, features = 1 + max(row.index for row in rows), Features.of([row.request.params for row in rows])
            conditions = num_rows, features, state.lengths.clone(), state.block_table.clone()
            self.untimed[count] = partial(runner.time_ms, *conditions)

    def measure(self, count: int) -> None:
        """Times the step of `count` requests, of which nothing is kept."""
        time_ms = self.untimed.pop(count)
        if count in self.known_ms:  # plain steps have run meanwhile
            return
        self.known_ms[count] = None
        try:
            self.known_ms[count] = time_ms()
        except Exception as error:  # a number less is no harm
            _logger.warning("EAGLEInference: no plain step could be timed: %s", first_line(error))
