"""The most memory that was held in each phase, phases inside of each other included."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class MemoryTracker:
    """`with tracker.phase("prefill"): ...` and then `tracker.peak_mib("prefill")`; phases may come again and nest.

    On a GPU the peak is of torch's allocator, whose counter is reset where a phase begins and ends: nothing else may
    reset it inside of one (`GenerationResult.from_stream` does, and tells a peak of its own). On the CPU of Linux it is
    that of the process's resident memory; elsewhere there is none, and peaks are None.

    A captured step allocates nothing when it is replayed, so that its draft and verify phases have one peak, the
    graph's; what differs are phases as load, prefill, decode.
    """

    def __init__(self, device: str | torch.device | None = None):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._open: list[str] = []
        self._peak_bytes: dict[str, int | None] = {}
        self._can_reset = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name in self._open:
            raise RuntimeError(f"MemoryTracker.phase: {name!r} must not lie in a phase of the same name")
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.remove(name)

    def peak_mib(self, name: str) -> float | None:
        """KeyError for a phase that never was."""
        if name not in self._peak_bytes:
            known = ", ".join(map(repr, self._peak_bytes)) or "none"
            raise KeyError(f"MemoryTracker.peak_mib: no phase {name!r}; there are: {known}")
        peak = self._peak_bytes[name]
        return None if peak is None else peak / 2**20

    def summary(self) -> dict[str, float | None]:
        """MiB by phase, in the order in which they first began."""
        return {name: self.peak_mib(name) for name in self._peak_bytes}

    def _settle(self) -> None:
        """What was reached since the last time counts for all phases that are open."""
        peak = self._read_peak_bytes() if self._open else None
        for name in self._open:
            known = [value for value in (self._peak_bytes.get(name), peak) if value is not None]
            self._peak_bytes[name] = max(known, default=None)
        self._reset_peak()

    def _read_peak_bytes(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            found = re.search(r"^VmHWM:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) * 1024 if found and self._can_reset else None

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            (_PROC / "clear_refs").write_text("5")  # the peak of resident memory becomes what there is now
            self._can_reset = True
        except OSError:
            self._can_reset = False
