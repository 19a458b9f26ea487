"""Times an op with other tuning rows: `python -m bench.tune --op gqa_decode --vary num_warps=2,4 --draw 5`.

Each combination of the varied values replaces those of the op's own row (`TUNING` in its file) and of what that row
says for special cases. Inputs change from call to call, so that the L2 cache holds none; a combination that cannot run
has no time. `--compile sm_90` times nothing: it compiles all of it for a GPU that is not here (harness/ahead.py).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from eagle_kernels.runtime import tuning

from .harness.ahead import Compiler
from .harness.declaration import Benchmark, Case, declared
from .harness.timing import quick_us, rotated


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", required=True, help="name of the op")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=VALUE,...",
                        help="an entry of the row and values for it, tuples as 1/2; may be given again")  # fmt: skip
    parser.add_argument("--rows", type=Path, help="a file with a JSON list of entries that belong together, as well")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--draw", type=int, metavar="SEED", help="cases drawn from a seed, not the declared ones")
    parser.add_argument("--count", type=int, default=20, help="how many are drawn (default: 20)")
    parser.add_argument("--compile", metavar="GPU", help="compile for this architecture, and time nothing")
    parser.add_argument("--log", type=Path, help="file to which a line of JSON is appended for each time")
    options = parser.parse_args(arguments)
    benchmark = next((each for each in declared() if each.op == options.op), None)
    if benchmark is None:
        parser.error(f"no op {options.op}")
    cases = benchmark.cases if options.draw is None else benchmark.drawn(options.draw, options.count)
    cases = [case for case in cases if options.case in case.name]
    variants = [{}, *_variants(options.vary), *(json.loads(options.rows.read_text()) if options.rows else [])]
    if options.compile:
        compiler = Compiler(options.compile)
        for case in cases:
            values = compiler.inputs(benchmark, case)
            for variant in variants:
                with _told(case, variant), _replaced(benchmark, variant):
                    compiler.compile(benchmark, values)
        print(f"{len(compiler.kernels)} kernels")
        return 0
    times = {}
    for case in cases:
        times[case.name] = _times(benchmark, case, variants)
        for variant, time_us in zip(variants, times[case.name]):
            line = json.dumps({"op": benchmark.op, "case": case.name, "row": variant, "us": time_us})
            if options.log is not None:
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(line + "\n")
        best = min(range(len(variants)), key=lambda at: times[case.name][at])
        print(f"{case.name}: {times[case.name][0]:.2f}, best {times[case.name][best]:.2f} {variants[best]}", flush=True)
    ratios = [[each[0] / each[at] for each in times.values()] for at in range(len(variants))]
    means = [math.prod(each) ** (1 / len(each)) for each in ratios]
    for at in sorted(range(len(variants)), key=lambda at: -means[at])[:20]:
        print(
            f"{means[at]:.3f} times as fast (geometric mean, worst {min(ratios[at]):.3f}): {variants[at] or 'as it is'}"
        )
    return 0


def _variants(given: Sequence[str]) -> list[dict]:
    """Returns every combination of entries that are given as NAME=VALUE,VALUE."""
    names, values = [], []
    for name, _, listed in (each.partition("=") for each in given):
        names.append(name)
        values.append([tuple(map(int, text.split("/"))) if "/" in text else int(text) for text in listed.split(",")])
    return [dict(zip(names, each)) for each in itertools.product(*values)] if names else []


@contextlib.contextmanager
def _replaced(benchmark: Benchmark, variant: dict) -> Iterator[None]:
    """Lets the op find rows with these entries."""
    found = tuning.row

    def row(table: dict, device: torch.device):
        result = found(table, device)
        if table is not benchmark.tuning or not variant:
            return result
        return (
            tuple(_merged(each, variant) for each in result) if isinstance(result, tuple) else _merged(result, variant)
        )

    with mock.patch.object(tuning, "row", row):
        yield


def _merged(row: dict, variant: dict) -> dict:
    """Returns the row with these entries, also where it has others for special cases."""
    special = {
        name: {key: each for key, each in value.items() if key not in variant}
        for name, value in row.items() if isinstance(value, dict)
    }  # fmt: skip
    return row | special | variant


@contextlib.contextmanager
def _told(case: Case, variant: dict) -> Iterator[None]:
    """Prints in a line why a row cannot be compiled or run."""
    try:
        yield
    except Exception as error:
        print(f"{case.name} {variant}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)


def _times(benchmark: Benchmark, case: Case, variants: Sequence[dict]) -> list[float]:
    """Returns the microseconds of a call with each row, infinity where it cannot run."""

    def make():
        values = benchmark.inputs(case, torch.device("cuda"))
        return lambda: benchmark.unplanned(**values)

    run, times = rotated(make, benchmark.count_bytes(**case.sizes), benchmark.rotated_bytes), []
    for variant in variants:
        times.append(math.inf)
        with _told(case, variant), _replaced(benchmark, variant):
            times[-1] = quick_us(run)
    return times


if __name__ == "__main__":
    sys.exit(main())
