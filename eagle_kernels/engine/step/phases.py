"""Times of a step's phases: device events on a GPU, also inside a captured graph, and the host's clock elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

# steps between two that the host waits for in order to read the times of their phases
TIMED_STEPS = 32

# a point in time: an event of a GPU, or seconds of the host's clock
Mark = torch.cuda.Event | float


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on `device` is done; returns at once on a CPU, which queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device, is_captured: bool = False) -> Mark:
    """Marks the time after everything queued so far on the current stream of `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, **({"external": True} if is_captured else {}))
    # Not the current device's stream: the models may be on another device.
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Returns the milliseconds between two marks, both of which the device must have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


class PhaseTimer:
    """Times the phases of one step: `with timer.phase("verify"): ...` during the step, `read_ms()` once it is done. On
    a GPU each phase begins where the one before it ended, since nothing is queued between two phases.
    is_captured: the step is captured in a CUDA graph, and every replay records the events anew. No other replay may
    begin between a replay and its `read_ms`.
    is_on: False: nothing is timed or recorded."""

    def __init__(self, device: torch.device, is_captured: bool = False, *, is_on: bool = True):
        self._device, self._is_captured, self._is_on = device, is_captured, is_on
        self._intervals: list[tuple[str, Mark, Mark]] = []
        # of a phase that has begun: a capture that an error breaks must end before the events that it recorded do
        self._start: Mark | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._is_on:
            yield
            return
        shares_event = self._device.type == "cuda" and len(self._intervals) > 0
        self._start = self._intervals[-1][2] if shares_event else mark(self._device, self._is_captured)
        yield
        self._intervals.append((name, self._start, mark(self._device, self._is_captured)))

    def read_ms(self) -> dict[str, float]:
        """Returns the milliseconds of each phase of the last step, which the device must have finished."""
        total_ms: dict[str, float] = {}
        for name, start, end in self._intervals:
            total_ms[name] = total_ms.get(name, 0.0) + elapsed_ms(start, end)
        return total_ms


class PhaseTimes:
    """Chooses the steps whose phases are timed, and holds their times. The next step overwrites the times of its
    phases, so the host must wait for a step to read them."""

    def __init__(self) -> None:
        self._left, self.held_ms = 0, deque[dict[str, float]](maxlen=256)

    def restart(self) -> None:
        """Forgets the times so far; the next step is timed."""
        self._left = 0
        self.held_ms.clear()

    def is_due(self, lag: int) -> bool:
        """Returns whether the step is timed that was launched now; without a lag the host waits for each."""
        is_due = lag == 0 or self._left == 0
        self._left = TIMED_STEPS if is_due else self._left - 1
        return is_due

    def take_ms(self, num_steps: int) -> dict[str, float]:
        """Returns each phase's device time over `num_steps` steps, scaled up from those timed since the last call."""
        timed = list(self.held_ms)
        self.held_ms.clear()
        return {name: sum(phases[name] for phases in timed) / len(timed) * num_steps for name in next(iter(timed), ())}
