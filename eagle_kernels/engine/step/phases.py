"""The times of a step's phases: by device events on a GPU, also inside a captured graph, by the clock elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on `device` is done; returns at once where nothing queues."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PhaseTimer:
    """A timer of one step's phases: `with timer.phase("verify"): ...` inside, `read_ms()` once the step is done.

    Each phase begins where the one before it ended: nothing is queued between two phases.

    is_captured  the step is captured in a CUDA graph, whose replays record the events anew. Between a replay and
                 `read_ms` no other replay may begin
    is_on        False: nothing is timed or recorded
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
        start = self._events[-1][2] if self._events else mark(self._device, self._is_captured)
        yield
        self._events.append((name, start, mark(self._device, self._is_captured)))

    def read_ms(self) -> dict[str, float]:
        """Returns the milliseconds of each phase of the last step, which the device must have finished."""
        total_ms: dict[str, float] = {}
        timed = [(name, start.elapsed_time(end)) for name, start, end in self._events]
        for name, elapsed_ms in [*timed, *self._host_ms]:
            total_ms[name] = total_ms.get(name, 0.0) + elapsed_ms
        return total_ms


def mark(device: torch.device, is_captured: bool = False) -> torch.cuda.Event:
    """Records an event with a time after everything queued so far."""
    event = torch.cuda.Event(enable_timing=True, **({"external": True} if is_captured else {}))
    # Not the current device's stream: the models may be on another device.
    event.record(torch.cuda.current_stream(device))
    return event
