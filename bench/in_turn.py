"""Times two checkouts on one GPU in turn, case by case: `python -m bench.in_turn OLD NEW [--op X] [--draw SEED]`.

Each checkout has a process of its own, both on one core of the host; they take turns in every sampling round, so that
what changes on the machine meets both. Compared are replays of CUDA graphs of the first provider, the launcher, and the
bytes of its results; with `--host` the host's time in a call, raw and public, of the first case of each op alone. Both
checkouts are first warmed for all cases by several processes, since compiling takes longest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

HOST_ROUNDS = 7


class Checkout:
    """A process that times what it is asked to, with the code of one checkout."""

    def __init__(self, folder: Path, drawn: Sequence[int] = ()):
        """drawn: the seed of its cases and how many they are; empty: those that are declared."""
        command = [sys.executable, __file__, "--worker", *map(str, drawn)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def ask(self, *question):
        """Returns the answer, after whatever else the process prints."""
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the process ended at {question}")

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *_) -> None:
        """Waits until the process has ended, which would disturb those that are timed."""
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.in_turn", description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="folders: the old one, the new one")
    parser.add_argument("--op", action="append", help="only this op; may be given several times")
    parser.add_argument("--case", action="append", help="only cases with this in the name; may be given several times")
    parser.add_argument("--draw", type=int, metavar="SEED", help="cases drawn from a seed, not the declared ones")
    parser.add_argument("--count", type=int, default=20, help="how many are drawn (default: 20)")
    parser.add_argument("--host", action="store_true", help="time the host, on the first case of each op, not the GPU")
    parser.add_argument("--warmers", type=int, default=12, help="processes that compile beforehand; 0: none")
    parser.add_argument("--log", type=Path, help="file to which a line of JSON is appended for each case")
    options = parser.parse_args()
    folders = [folder.resolve() for folder in options.checkouts]
    drawn = [] if options.draw is None else [options.draw, options.count]
    old, new = (Checkout(folder, drawn) for folder in folders)
    has = [{tuple(case) for case in checkout.ask("cases", options.host)} for checkout in (old, new)]
    texts, ops = options.case or [""], options.op
    cases = sorted(c for c in has[0] & has[1] if any(t in c[1] for t in texts) and (not ops or c[0] in ops))
    begin, each = time.monotonic(), options.warmers // 2
    with ThreadPoolExecutor(max(options.warmers, 1)) as pool:
        # Neighbours share kernels, so each process takes a run of them: no two compile the same.
        runs = [cases[first * len(cases) // each : (first + 1) * len(cases) // each] for first in range(each)]
        warmed = [pool.submit(_warm, folder, drawn, run) for folder in folders for run in runs]
        for one in warmed:
            one.result()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    rows = []
    for op, case in cases:
        rows.append({"op": op, "case": case, **_compare(old, new, op, case, options.host)})
        print(*rows[-1].values(), flush=True)
        if options.log is not None:
            with options.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(rows[-1]) + "\n")
    print(f"{len(rows)} cases after {time.monotonic() - begin:.0f} s")
    _report(rows)


def _warm(folder: Path, drawn: list[int], cases: list) -> None:
    with Checkout(folder, drawn) as checkout:
        for op, case in cases:
            checkout.ask("call", op, case)


def _compare(old: Checkout, new: Checkout, op: str, case: str, is_host: bool) -> dict:
    answers = [checkout.ask("prepare", op, case, is_host) for checkout in (old, new)]
    if any("error" in answer for answer in answers):
        return {"errors": [answer.get("error") for answer in answers]}
    samples = [[], []]
    for number in range(HOST_ROUNDS if is_host else 5):
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            samples[at].append((old, new)[at].ask("sample", is_host))
    if not is_host:
        samples = [each[-1:] for each in samples]  # the last one is the median of all
    times = {name: [median(sample[name] for sample in each) for each in samples] for name in samples[0][0]}
    return {"is_equal": answers[0]["digest"] == answers[1]["digest"]} | times


def _report(rows: list[dict]) -> None:
    """Prints what failed or differs, and for each kind of time the mean ratio and the cases that are 1 % slower."""
    for row in rows:
        if "errors" in row or not row["is_equal"]:
            print(row["op"], row["case"], row.get("errors", "other results"))
    kinds = {name for row in rows for name in row if name.endswith("_us")}
    for kind in sorted(kinds):
        ratios = {(row["op"], row["case"]): row[kind][1] / row[kind][0] for row in rows if kind in row}
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        ends = f"{min(ratios.values()):.3f} to {max(ratios.values()):.3f}"
        print(f"{kind}: new / old {mean:.4f} (geometric mean), {ends}")
        for (op, case), ratio in sorted(ratios.items(), key=lambda each: -each[1]):
            if ratio > 1.01:
                print(f"    {ratio:.3f} {op} [{case}]")


def _work(drawn: list[int]) -> None:
    """Answers questions from stdin, with the benchmarks of the checkout in the current folder."""
    sys.path[0] = os.getcwd()
    from bench.harness import timing
    from bench.harness.declaration import declared

    device, run, public, watch = torch.device("cuda"), None, None, None
    benchmarks = {b.op: b for b in declared() if not drawn or b.drawn is not None}
    cases = {op: b.drawn(*drawn) if drawn else b.cases for op, b in benchmarks.items()}

    def called(op, case_name):
        benchmark = benchmarks[op]
        case = next(case for case in cases[op] if case.name == case_name)
        provider = next(iter(benchmark.all_providers(False).values()))
        make = lambda: provider(benchmark.inputs(case, device))  # noqa: E731
        run = timing.rotated(make, benchmark.count_bytes(**case.sizes)) if drawn else make()
        result = run()
        torch.cuda.synchronize()
        return benchmark, case, run, result

    for line in sys.stdin:
        what, *given = json.loads(line)
        answer = {}
        try:
            if what == "cases":
                answer = [(op, case.name) for op in benchmarks for case in cases[op][: 1 if given[0] else None]]
            elif what == "call":
                called(*given)
            elif what == "prepare":
                if hasattr(os, "sched_setaffinity"):  # not before: those that warm up run side by side
                    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
                op, case, is_host = given
                run = public = watch = None
                torch.cuda.empty_cache()
                benchmark, case, run, result = called(op, case)
                answer["digest"] = "" if benchmark.mutates else _digest(result)
                if is_host:
                    public = benchmark.prepare_public(benchmark.inputs(case, device))
                    public()
                else:
                    watch = timing.Stopwatch(run)
            elif given[0]:
                answer = {"raw_us": timing.host_us(run), "public_us": timing.host_us(public)}
            else:
                watch.take_round()
                answer = {"graph_us": watch.times(graphs_only=True).graph_p50_us}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("answer " + json.dumps(answer), flush=True)


def _digest(result) -> str:
    """Returns what the bytes of small results come to; results that only their shape fits count as equal."""
    tensors = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None and 0 < tensor.nbytes <= 1 << 24:
            found.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    _work([int(number) for number in sys.argv[2:]]) if sys.argv[1:2] == ["--worker"] else main()
