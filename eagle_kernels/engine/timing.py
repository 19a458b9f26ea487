"""Time of phases: device events on a GPU, inside a captured graph too, the wall clock elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

# of one name of a `CUDATimerCollection`: the device is never so many intervals behind, so reading the oldest is free
_MOST_UNREAD = 256


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on `device` is done; returns at once where nothing queues."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cuda_sync_time(device: str | torch.device | None = None) -> float:
    """Seconds of the wall clock, once everything queued on the device is done; None: the GPU where there is one.

    Everything else that is queued is waited for as well: to time a part of a stream without that, `CUDATimer`.
    """
    synchronize(_device(device))
    return time.perf_counter()


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Linear between the two samples around it, as NumPy's; None of no samples."""
    return torch.tensor(samples, dtype=torch.float64).quantile(percent / 100).item() if samples else None


def round_times_s(first_s: float, arrivals: Sequence[tuple[float, bool]]) -> list[tuple[float, int]]:
    """(seconds, tokens) of each round behind the first token of a request, which came at `first_s`.

    arrivals  of each token after the first: when it came, and whether a draft had guessed it. A round ends with the
              target's own token, or where the request does
    """
    rounds, num_pending, last_s = [], 0, first_s
    for index, (now_s, is_draft) in enumerate(arrivals, 1):
        num_pending += 1
        if not is_draft or index == len(arrivals):
            rounds.append((now_s - last_s, num_pending))
            last_s, num_pending = now_s, 0
    return rounds


class CUDATimer:
    """Time on the device of what `with CUDATimer() as timer:` holds, by two events on its current stream.

    Neither end waits for anything. `elapsed_ms` waits for the second event alone: what was queued behind it, or on
    other streams, goes on. Without a GPU, and of the CPU, it is the wall clock.

    device  None: the current GPU where there is one, else the CPU
    """

    def __init__(self, device: str | torch.device | None = None):
        self._device = _device(device)
        self._start: torch.cuda.Event | float | None = None
        self._end: torch.cuda.Event | float | None = None

    def __enter__(self) -> CUDATimer:
        self._end = None
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:  # else there is nothing to end
            self._end = self._now()

    @property
    def elapsed_ms(self) -> float:
        """RuntimeError before the block has ended."""
        if self._end is None:
            state = "was never entered" if self._start is None else "is still running"
            raise RuntimeError(f"CUDATimer: elapsed_ms is known once the with block has ended; this one {state}")
        if isinstance(self._end, float):
            return 1e3 * (self._end - self._start)
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _now(self) -> torch.cuda.Event | float:
        return _mark(self._device) if self._device.type == "cuda" else time.perf_counter()

    def __repr__(self) -> str:
        return f"CUDATimer({'not finished' if self._end is None else f'{self.elapsed_ms:.3f} ms'})"


class CUDATimerCollection:
    """Times by name, of intervals that may come again and overlap: draft, verify, sample, bookkeeping, or any others.

    `with timers.phase("verify"):` waits for nothing until a time is read; `start` and `stop` are for where a block does
    not fit, and since `stop` returns its interval's time it waits for the interval to be done.
    `elapsed_ms` and `summary` tell the sum of all intervals of a name since the last `reset`.
    """

    def __init__(self, device: str | torch.device | None = None):
        self._device = _device(device)
        self.reset()

    def start(self, name: str) -> None:
        """RuntimeError where it already runs."""
        if name in self._running:
            raise RuntimeError(f"CUDATimerCollection.start: {name!r} is running; stop it first")
        self._running[name] = CUDATimer(self._device).__enter__()

    def stop(self, name: str) -> float:
        """Milliseconds since its start. RuntimeError where it does not run."""
        return self._finish(name).elapsed_ms

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """An interval that nobody waits for."""
        self.start(name)
        running = self._running
        try:
            yield
        finally:
            if self._running is running:  # else a `reset` inside has forgotten it
                self._finish(name)

    def reset(self) -> None:
        """Forgets all times, and what is running."""
        self._running: dict[str, CUDATimer] = {}
        self._unread: dict[str, deque[CUDATimer]] = {}
        self._total_ms: dict[str, float] = {}

    def elapsed_ms(self, name: str) -> float:
        """KeyError for a name without a finished interval."""
        if name not in self._total_ms:
            known = ", ".join(map(repr, self._total_ms)) or "none"
            raise KeyError(f"CUDATimerCollection.elapsed_ms: no finished interval of {name!r}; there are: {known}")
        while self._unread[name]:
            self._read_oldest(name)
        return self._total_ms[name]

    def summary(self) -> dict[str, float]:
        """Milliseconds by name, in the order in which they first ended."""
        return {name: self.elapsed_ms(name) for name in self._total_ms}

    @property
    def names(self) -> list[str]:
        """Of finished intervals."""
        return list(self._total_ms)

    def _finish(self, name: str) -> CUDATimer:
        timer = self._running.pop(name, None)
        if timer is None:
            raise RuntimeError(f"CUDATimerCollection.stop: {name!r} is not running; start it first")
        timer.__exit__()
        self._total_ms.setdefault(name, 0.0)
        unread = self._unread.setdefault(name, deque())
        unread.append(timer)
        if len(unread) > _MOST_UNREAD:
            self._read_oldest(name)
        return timer

    def _read_oldest(self, name: str) -> None:
        self._total_ms[name] += self._unread[name].popleft().elapsed_ms

    def __repr__(self) -> str:
        width = max(map(len, self.names), default=0)
        lines = [f"  {name:<{width}} : {elapsed_ms:8.3f} ms" for name, elapsed_ms in self.summary().items()]
        return "\n".join(["CUDATimerCollection:", *(lines or ["  nothing timed"])])


class PhaseTimer:
    """The phases of one step: `with timer.phase("verify"): ...` inside, `read_ms()` once it is done.

    Each begins where the one before it ended: nothing is queued between two phases.
    is_captured: the step is captured in a CUDA graph, whose replays then record the events anew. Between a replay and
    `read_ms` no other replay may begin.
    is_on: False times nothing, and records nothing.
    """

    def __init__(self, device: torch.device, is_captured: bool = False, *, is_on: bool = True):
        self._device, self._is_captured, self._is_on = device, is_captured, is_on
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._host_ms: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._is_on:
            yield
            return
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._host_ms.append((name, 1e3 * (time.perf_counter() - start_s)))
            return
        start = self._events[-1][2] if self._events else _mark(self._device, self._is_captured)
        yield
        self._events.append((name, start, _mark(self._device, self._is_captured)))

    def read_ms(self) -> dict[str, float]:
        """Milliseconds of each phase of the last step, which the device must have finished."""
        total_ms: dict[str, float] = {}
        timed = [(name, start.elapsed_time(end)) for name, start, end in self._events]
        for name, elapsed_ms in [*timed, *self._host_ms]:
            total_ms[name] = total_ms.get(name, 0.0) + elapsed_ms
        return total_ms


def _mark(device: torch.device, is_captured: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, **({"external": True} if is_captured else {}))
    # Not the current device's stream: the models may be on another device.
    event.record(torch.cuda.current_stream(device))
    return event


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
