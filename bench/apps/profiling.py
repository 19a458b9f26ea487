"""What measuring costs a step: `python -m bench.run --app profiling [--shape small]`.

Steps of the shape of Llama-3.1-8B, a tree and plain, as `--app generation` times them: without events
(`EAGLEConfig(phase_times=False)`), with those between the phases of a step, and with a `CUDATimerCollection` around
every step beside them. Each way twice
in turns; the faster one counts. Prints a table and writes JSON lines to `results/<gpu>/profiling.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from eagle_kernels.engine.serve import scheduler
from eagle_kernels.tools.measure import CUDATimerCollection

from .generation import PROMPT_TOKENS, Bench
from .shared import start

CASES = {"plain": None, "tree 8/5/64": (8, 5, 64)}
ACCEPT = 4.0


@contextlib.contextmanager
def _with_timers() -> Iterator[None]:
    kept = scheduler.Scheduler.step
    timers = CUDATimerCollection()

    def timed(self, *arguments):
        with timers.phase("step"):
            kept(self, *arguments)

    scheduler.Scheduler.step = timed
    try:
        yield
    finally:
        scheduler.Scheduler.step = kept


# what is put around a run, and fields of its configuration
WAYS: dict[str, tuple[Callable, dict]] = {
    "no events": (contextlib.nullcontext, {"phase_times": False}),
    "events of phases": (contextlib.nullcontext, {}),
    "and timers around": (_with_timers, {}),
}


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs all cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app profiling")
    parser.add_argument("--steps", type=int, default=100)
    options, device, keep = start(parser, arguments, directory, commit)
    bench = Bench(options.shape, device, options.steps, PROMPT_TOKENS if device.type == "cuda" else 3)
    for case, tree in CASES.items():
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(2):
            for name, (around, fields) in WAYS.items():
                with around():
                    engine = bench.engine(1, tree, ACCEPT if tree else 1.0, **fields)
                    times[name].append(bench.step_ms(engine, 1, is_plain=tree is None)[0])
                    del engine
        least = min(times["no events"])
        for name, measured in times.items():
            line = {"op": "profiling", "case": case, "provider": name, "step_ms": round(min(measured), 4)}
            line["of_none"] = round(min(measured) / least, 4)
            print(f"{case:14} {name:20} {line['step_ms']:9.3f} ms  {line['of_none']:.4f} of none", flush=True)
            keep(line)
    return 0
