"""Checks, then times: `python -m bench.run --op build_tree [--case B=32] [--peers] [--list] [--results DIR|none]`.

Without `--op` all benchmarks run. No provider is timed that disagrees with the reference. `--check-only` checks the
small cases of every declaration and times nothing; it needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .harness import results
from .harness.check import Mismatch, check_provider, expected_outputs
from .harness.declaration import Benchmark, Case, Unavailable, declared
from .harness.timing import measure


def main(arguments: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] | None = None) -> int:
    """Runs the command line; a `bench_X.py` passes its own benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", action="append", help="name of an op; may be given several times")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--peers", action="store_true", help="run installed packages of other projects as well")
    parser.add_argument("--list", action="store_true", help="print ops, cases and providers, and run nothing")
    parser.add_argument("--results", default=str(results.DIRECTORY), help="folder for JSON lines, or none")
    parser.add_argument("--commit", default=results.checkout_commit(), help="recorded with results; git's by default")
    parser.add_argument("--check-only", action="store_true", help="check the small cases, time nothing")
    options = parser.parse_args(arguments)

    benchmarks = list(benchmarks or declared())
    unknown = set(options.op or ()) - {benchmark.op for benchmark in benchmarks}
    if unknown:
        parser.error(f"no benchmark of {', '.join(sorted(unknown))}; --list names all")
    if options.op:
        benchmarks = [benchmark for benchmark in benchmarks if benchmark.op in options.op]
    if options.list:
        for benchmark in benchmarks:
            print(f"{benchmark.op}: {', '.join(benchmark.all_providers(with_peers=True))}")
            print("".join(f"    {case.name}\n" for case in benchmark.cases), end="")
        return 0
    if not options.check_only and not torch.cuda.is_available():
        print("timing needs a GPU; --check-only checks the small cases without one")
        return 2

    is_red = False
    for benchmark in benchmarks:
        runner = _Runner(benchmark, options.peers)
        runner.check(benchmark.small_cases)
        if options.check_only:
            print(f"{benchmark.op}: {', '.join(runner.agreeing()) or 'nobody'} agree with the reference", flush=True)
        else:
            cases = [case for case in benchmark.cases if options.case in case.name]
            lines = runner.time(cases, None if options.results == "none" else Path(options.results), options.commit)
            print(f"{benchmark.op}\n{results.table(lines)}\n", flush=True)
        is_red |= bool(runner.red)
    return int(is_red)


class _Runner:
    """Checks and times the providers of one benchmark; one that was `red` once is not run again."""

    def __init__(self, benchmark: Benchmark, with_peers: bool):
        self.benchmark = benchmark
        self.providers = benchmark.all_providers(with_peers)
        self.red: set[str] = set()
        self._ran: set[str] = set()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def agreeing(self) -> list[str]:
        """The providers that ran and were right every time."""
        return [provider for provider in self.providers if provider in self._ran - self.red]

    def check(self, cases: Sequence[Case]) -> None:
        for case in cases:
            expected = expected_outputs(self.benchmark, case, self.device)
            for provider in self.providers:
                self._check(case, provider, expected)

    def time(self, cases: Sequence[Case], directory: Path | None, commit: str) -> list[dict]:
        """Result records of the cases; appended to the files in `directory` one by one."""
        lines = []
        for case in cases:
            expected = expected_outputs(self.benchmark, case, self.device) if case.is_checked else None
            for provider, prepare in self.providers.items():
                if provider in self.red or (expected is not None and not self._check(case, provider, expected)):
                    continue
                try:
                    run = prepare(self.benchmark.inputs(case, self.device))
                except Unavailable as reason:
                    _say(f"{provider}: {reason}")
                    continue
                run()
                lines.append(results.record(self.benchmark, case, provider, measure(run), commit))
                if directory is not None:
                    results.append(directory, lines[-1])
                del run
                torch.cuda.empty_cache()
        return lines

    def _check(self, case: Case, provider: str, expected: dict[str, torch.Tensor]) -> bool:
        """Whether the provider ran and agrees."""
        try:
            check_provider(self.benchmark, case, self.providers[provider], expected, self.device)
        except Unavailable as reason:
            _say(f"{provider}: {reason}")
            return False
        except Mismatch as difference:
            _say(f"RED {self.benchmark.op} [{case.name}] {provider}: {difference}")
            self.red.add(provider)
            return False
        self._ran.add(provider)
        return True


@functools.cache
def _say(line: str) -> None:
    """Prints a line, the first time only."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
