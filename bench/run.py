"""Checks, then times: `python -m bench.run --op build_tree [--case B=32] [--peers] [--list] [--results DIR|none]`.

Without `--op` all benchmarks run; `--provider` selects among theirs, `--sweep` adds the sizes that `python -m
bench.plot` draws. `--draw SEED` times, in place of the declared cases, others as servers have them, from which no
setting was chosen; their inputs change from call to call, so that the L2 cache holds none. No provider is timed that
disagrees with the reference. `--check-only` checks the small cases of every declaration and times nothing; it needs no
GPU. `--host` times the host's part in one call alone, on the smallest case of every op: all arguments and `out=` given,
nothing before it on the GPU and no wait for its end; above them, for comparison, an empty kernel through Triton's own
launch and one operator of torch. `--compile sm_90` fills Triton's cache for a GPU that is not here (harness/ahead.py),
`--jobs 12` does so for the one that is, by as many processes before anything is timed.
The README's tables are made of the results by `python -m bench.report`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eagle_kernels.runtime.interpreter import speed_up
from eagle_kernels.runtime.language import is_interpreting, triton

from .harness import results
from .harness.ahead import Compiler
from .harness.check import Mismatch, check_provider, expected_outputs
from .harness.declaration import Benchmark, Case, Run, Unavailable, declared
from .harness.timing import Stopwatch, host_us, rotated


def main(arguments: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] | None = None) -> int:
    """Runs the command line, of all benchmarks if none are given. Returns the exit status."""
    # what an app shares with ops; it has options of its own, `--case` among them
    shared = argparse.ArgumentParser(prog="python -m bench.run", add_help=False, allow_abbrev=False)
    shared.add_argument("-h", "--help", action="store_true", help="show this, or with --app what that one takes")
    shared.add_argument("--app", help="in place of ops: a benchmark of the whole engine; its own options follow")
    shared.add_argument("--results", default=str(results.DIRECTORY), help="folder for JSON lines, or none")
    shared.add_argument("--commit", default=results.checkout_commit(), help="recorded with results; git's by default")
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__.partition("\n")[0], add_help=False, parents=[shared]
    )
    parser.add_argument("--op", action="append", help="name of an op; may be given several times")
    parser.add_argument("--case", action="append", help="only cases with this in the name; may be given several times")
    parser.add_argument("--peers", action="store_true", help="run installed packages of other projects as well")
    parser.add_argument("--sweep", action="store_true", help="also the sizes that only plots are made of")
    parser.add_argument(
        "--draw", type=int, metavar="SEED", help="cases drawn from a seed, in place of the declared ones"
    )
    parser.add_argument("--count", type=int, default=20, help="how many cases of each op are drawn (default: 20)")
    parser.add_argument("--host", action="store_true", help="time the host's part in one call alone, by every provider")
    parser.add_argument("--graphs", action="store_true", help="time CUDA graphs only, which is faster")
    parser.add_argument("--provider", action="append", help="only this provider; may be given several times")
    parser.add_argument("--list", action="store_true", help="print ops, cases and providers, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile beforehand; 1: this one alone")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)  # which of how many of these this is
    parser.add_argument("--compile", metavar="GPU", help="compile for this architecture (sm_90), run nothing")
    parser.add_argument("--check-only", action="store_true", help="check the small cases, time nothing")
    options, rest = shared.parse_known_args(arguments)
    if options.app is not None:
        from .apps import APPS  # they import the engine

        if options.app not in APPS:
            parser.error(f"no app {options.app}; there are {', '.join(APPS)}")
        rest += ["--help"] * options.help
        return APPS[options.app].main(
            rest, None if options.results == "none" else Path(options.results), options.commit
        )
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        parser.print_help()
        return 0
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    if is_interpreting():
        speed_up()
    benchmarks = benchmarks or declared()
    unknown = set(options.op or ()) - {benchmark.op for benchmark in benchmarks}
    if unknown:
        parser.error(f"no benchmark of {', '.join(sorted(unknown))}; --list names all")
    if options.op:
        benchmarks = [benchmark for benchmark in benchmarks if benchmark.op in options.op]
    known = {name for benchmark in benchmarks for name in benchmark.all_providers(with_peers=True)}
    unknown = set(options.provider or ()) - known
    if unknown:
        parser.error(f"no provider {', '.join(sorted(unknown))}; --list names all")
    if options.draw is not None:
        benchmarks = [benchmark for benchmark in benchmarks if benchmark.drawn is not None]
        cases = {b.op: b.drawn(options.draw, options.count) for b in benchmarks}
    else:
        cases = {b.op: [*b.cases, *(b.sweep if options.sweep else ())] for b in benchmarks}
    texts = options.case or [""]
    cases = {op: [case for case in each if any(text in case.name for text in texts)] for op, each in cases.items()}
    if options.list:
        for benchmark in benchmarks:
            print(f"{benchmark.op}: {', '.join(benchmark.all_providers(with_peers=True))}")
            print("".join(f"    {case.name}\n" for case in cases[benchmark.op]), end="")
        return 0
    if options.compile:
        compiler = Compiler(options.compile)
        for benchmark in benchmarks:
            for case in [*benchmark.small_cases, *cases[benchmark.op]]:
                compiler.compile(benchmark, compiler.inputs(benchmark, case))
        print(f"{len(compiler.kernels)} kernels")
        return 0
    if not options.check_only and not torch.cuda.is_available():
        print("timing needs a GPU; --check-only checks the small cases without one")
        return 2

    with_peers = options.peers or bool(options.provider)
    runners = [
        _Runner(benchmark, with_peers, options.provider, options.graphs, options.draw) for benchmark in benchmarks
    ]
    if options.share is not None:
        _call_share(
            [(r, case) for r in runners for case in (*r.benchmark.small_cases, *cases[r.benchmark.op])], *options.share
        )
        return 0
    if options.jobs > 1:
        command = [sys.executable, "-m", "bench.run", *(sys.argv[1:] if arguments is None else arguments), "--share"]
        numbers = range(options.jobs)
        for process in [subprocess.Popen([*command, str(number), str(options.jobs)]) for number in numbers]:
            process.wait()
    if options.host:
        return _print_host_times(runners)
    is_red, run = False, results.new_run()
    for benchmark, runner in zip(benchmarks, runners):
        runner.check(benchmark.small_cases)
        if options.check_only:
            print(f"{benchmark.op}: {', '.join(runner.agreeing()) or 'nobody'} agree with the reference", flush=True)
        else:
            directory = None if options.results == "none" else Path(options.results)
            lines = runner.time(cases[benchmark.op], directory, options.commit, run)
            print(f"{benchmark.op}\n{results.table(lines)}\n", flush=True)
        is_red |= bool(runner.red)
    return int(is_red)


class _Runner:
    """Checks and timings of the providers of one benchmark; one that was `red` once is not run again."""

    def __init__(
        self,
        benchmark: Benchmark,
        with_peers: bool,
        only: Sequence[str] | None = None,
        graphs_only: bool = False,
        seed: int | None = None,
    ):
        """seed: of cases that were drawn, which are timed in graphs alone, with inputs that the L2 does not hold."""
        self.benchmark, self.graphs_only, self.seed = benchmark, graphs_only or seed is not None, seed
        providers = benchmark.all_providers(with_peers)
        self.providers = {name: prepare for name, prepare in providers.items() if not only or name in only}
        self.red: set[str] = set()
        self._ran: set[str] = set()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def agreeing(self) -> list[str]:
        """Returns the providers that ran and were right every time."""
        return [provider for provider in self.providers if provider in self._ran - self.red]

    def check(self, cases: Sequence[Case]) -> None:
        for case in cases:
            expected = expected_outputs(self.benchmark, case, self.device)
            for provider in self.providers:
                self._check(case, provider, expected)

    def time(self, cases: Sequence[Case], directory: Path | None, commit: str, run: str) -> list[dict]:
        """Returns result records of the cases, each added to its file in `directory` at once."""
        lines = []
        for case in cases:
            expected = expected_outputs(self.benchmark, case, self.device) if case.is_checked else None
            watches: dict[str, Stopwatch] = {}
            for provider in self.providers:
                if provider in self.red or (expected is not None and not self._check(case, provider, expected)):
                    continue
                with self._reasons(provider):
                    call = self._call(case, provider)
                    call()
                    watches[provider] = Stopwatch(call)
            for _ in range(Stopwatch.ROUNDS):
                for watch in watches.values():
                    watch.take_round()
            while watches:
                provider = next(iter(watches))
                with self._reasons(provider):
                    times = watches.pop(provider).times(self.graphs_only)
                    has_public = provider == "eagle_kernels" and not self.graphs_only
                    public = self._public_host_us(case) if has_public else None
                    lines.append(results.record(self.benchmark, case, provider, times, commit, run, public, self.seed))
                    if directory is not None:
                        results.append(directory, lines[-1])
                torch.cuda.empty_cache()
        return lines

    def _call(self, case: Case, provider: str) -> Run:
        """Returns the call that is timed."""
        make = lambda: self.providers[provider](self.benchmark.inputs(case, self.device))  # noqa: E731
        if self.seed is None and not self.benchmark.rotated_bytes:
            return make()
        return rotated(make, self.benchmark.count_bytes(**case.sizes), self.benchmark.rotated_bytes)

    def host_times(self) -> dict[str, float]:
        """Returns the host's microseconds in one call, on the smallest case: of ours, raw and public, and of others."""
        case = min(self.benchmark.cases, key=lambda case: self.benchmark.count_bytes(**case.sizes))
        providers, times = dict(self.providers), {}
        if (raw := providers.pop("eagle_kernels", None)) is not None:
            providers = {"raw": raw, "public": self.benchmark.prepare_public, **providers}
        for name, prepare in providers.items():
            with self._reasons(name):
                times[name] = _host_us(prepare(self.benchmark.inputs(case, self.device)))
        return times

    def _public_host_us(self, case: Case) -> float:
        """Returns the host's time in a call of the public function."""
        return _host_us(self.benchmark.prepare_public(self.benchmark.inputs(case, self.device)))

    def _check(self, case: Case, provider: str, expected: dict[str, torch.Tensor]) -> bool:
        """Tells whether the provider ran and agrees."""
        with self._reasons(provider):
            try:
                check_provider(self.benchmark, case, self.providers[provider], expected, self.device)
            except Mismatch as difference:
                _say(f"RED {self.benchmark.op} [{case.name}] {provider}: {difference}")
                self.red.add(provider)
                return False
            self._ran.add(provider)
            return True
        return False

    @contextlib.contextmanager
    def _reasons(self, provider: str):
        """Prints in one line why a provider cannot run; of a peer, any error counts: what is not ours may fail. Torch's
        form may need more memory than there is."""
        try:
            yield
        except Unavailable as reason:
            _say(f"{provider}: {reason}")
        except Exception as error:
            is_large = provider == "torch" and isinstance(error, torch.OutOfMemoryError)
            if provider not in self.benchmark.peers and not is_large:
                raise
            _say(f"{provider}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _call_share(cases: Sequence[tuple[_Runner, Case]], number: int, of: int) -> None:
    """Calls each provider once on one of so many runs of cases: neighbours share kernels, and no two compile the same.

    What goes wrong is told when the case is timed. Torch's form compiles nothing.
    """
    for runner, case in cases[number * len(cases) // of : (number + 1) * len(cases) // of]:
        for name in runner.providers.keys() - {"torch"}:
            with contextlib.suppress(Exception):
                runner.providers[name](runner.benchmark.inputs(case, runner.device))()


@triton.jit(do_not_specialize=["size"])
def _empty_kernel(tensor_ptr, size):
    pass


def _print_host_times(runners: Sequence[_Runner]) -> int:
    number = torch.zeros(1, device="cuda")
    empty_us, fill_us = _host_us(lambda: _empty_kernel[(1,)](number, 1)), _host_us(lambda: number.fill_(1.0))
    print(f"empty kernel by Triton {empty_us:.1f}   fill by torch {fill_us:.1f}")
    for runner in runners:
        times = (f"{name} {time_us:.1f}" for name, time_us in runner.host_times().items())
        print(f"{runner.benchmark.op}: {'   '.join(times)}", flush=True)
    return 0


def _host_us(call: Callable[[], object]) -> float:
    """Returns the host's time in a call that has not run before."""
    call()
    return host_us(call)


@functools.cache
def _say(line: str) -> None:
    """Prints a line, the first time only."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
