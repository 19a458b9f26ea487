"""Time per phase of a step: device events on a GPU (read once, at the end), the wall clock elsewhere."""

from __future__ import annotations

import contextlib
import time

import torch


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on `device` is done; returns at once where nothing queues."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PhaseTimer:
    """Adds up named phases: `with timer.phase("verify"): ...`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._total_ms: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str):
        if self._device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Not the current device's stream: the models may be on another device.
            start.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((name, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._add(name, 1e3 * (time.perf_counter() - start_s))

    def total_ms(self) -> dict[str, float]:
        """Milliseconds of each phase so far; waits for the device."""
        if self._events:
            synchronize(self._device)
            for name, start, end in self._events:
                self._add(name, start.elapsed_time(end))
            self._events.clear()
        return dict(self._total_ms)

    def _add(self, name: str, elapsed_ms: float) -> None:
        self._total_ms[name] = self._total_ms.get(name, 0.0) + elapsed_ms
