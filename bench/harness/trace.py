"""What the device did, from a trace of PyTorch's profiler."""

import collections
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

WARM_STEPS = 8
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def graph_gaps_us(step: Callable[[], object], count: int) -> list[float]:
    """How long the device has nothing to do before each CUDA graph of `count` steps, kernels and copies being work;
    behind some that are not traced."""
    return gaps_us(_traced(step, count))


def kernel_us(step: Callable[[], object], count: int) -> list[tuple[str, float, float]]:
    """(kernel or copy, times in a step, microseconds of all of them in a step) of `count` steps, the largest first.

    Some steps before are not traced. A kernel that starts while the one before ends counts its waiting time, too.
    """
    events = [event for event in _traced(step, count) if event.get("cat") in _WORK]
    return [(name, number / count, total / count) for name, number, total in sums_us(events)]


def _traced(step: Callable[[], object], count: int) -> list[dict]:
    for _ in range(WARM_STEPS):
        step()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]


def sums_us(events: list[dict]) -> list[tuple[str, int, float]]:
    """(name, events, microseconds) of each name, the largest first."""
    numbers, totals = collections.Counter(), collections.Counter()
    for event in events:
        numbers[event["name"]] += 1
        totals[event["name"]] += event["dur"]
    return [(name, numbers[name], total) for name, total in totals.most_common()]


def gaps_us(events: list[dict]) -> list[float]:
    """How long the device has nothing to do before each graph: kernels of one launch share its number."""
    work = [event for event in events if event.get("cat") in _WORK]
    work.sort(key=lambda event: event["ts"])
    counts = collections.Counter(event["args"].get("correlation") for event in work)
    gaps, seen, busy_until = [], set(), None
    for event in work:
        launch = event["args"].get("correlation")
        if counts[launch] > 1 and launch not in seen and busy_until is not None:
            gaps.append(max(0.0, event["ts"] - busy_until))
        seen.add(launch)
        busy_until = max(busy_until or 0.0, event["ts"] + event["dur"])
    return gaps
