"""Time per phase of a step: device events on a GPU (read once, at the end), the wall clock elsewhere."""

from __future__ import annotations

import contextlib
import time

import torch


class PhaseTimer:
    """Adds up named phases: `with timer.phase("verify"): ...`."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._total_ms: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str):
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._add(name, 1e3 * (time.perf_counter() - start_s))

    def total_ms(self) -> dict[str, float]:
        """Milliseconds of each phase so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, start, end in self._events:
                self._add(name, start.elapsed_time(end))
            self._events.clear()
        return dict(self._total_ms)

    def _add(self, name: str, elapsed_ms: float) -> None:
        self._total_ms[name] = self._total_ms.get(name, 0.0) + elapsed_ms
