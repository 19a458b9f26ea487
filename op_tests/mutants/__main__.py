"""Planted bugs: `python -m op_tests.mutants [--list] [--only NAME] [--quarter] [--alike]`.

Each mutant is a list of edits, made in a copy of the repository; then only the tests that it names run there, as the
short suite runs them, and one of them must fail by an assertion. A bug that kernel and reference share does not show
where one is compared with the other: a law must see it (laws.py). Others are planted in the kernel alone (kernels.py),
the engine (engine.py), the plug-ins (plug_ins.py), or in the enumeration, where a negative control must see it.

Printed is what caught each mutant. Exit code 1: one survived, or its tests broke instead of failing, or an edit no
longer applies (test_mutants.py says that too), in which case the mutant follows the code. `--alike` also checks that
kernel = reference does not see the bugs planted in both, so that it was the law test that was needed.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import MUTANTS
from .mutant import ROOT, Mutant, of

COPIED = ("eagle_kernels", "reference", "op_tests", "bench", "pyproject.toml", "README.md")
SECONDS = 180
_of_thread = threading.local()


def plant(mutant: Mutant, folder: Path) -> None:
    """Copies the repository into an empty folder, and makes the edits there."""
    ignored = shutil.ignore_patterns("results", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    for name, old, new in mutant.edits:
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def start_forks() -> None:
    """Starts the process whose forks run this thread's tests."""
    command = [sys.executable, Path(__file__).with_name("forks.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    _of_thread.forks = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def failures(tests: list[str], folder: Path) -> tuple[list[str], str]:
    """The tests that failed by an assertion there, and what went wrong otherwise ("" for nothing)."""
    report = folder / "report.xml"
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    print(json.dumps([str(folder), SECONDS, *options, *tests]), file=_of_thread.forks.stdin)
    exit_code = int(_of_thread.forks.stdout.readline())
    if exit_code == -signal.SIGALRM:
        return [], f"still running after {SECONDS} s"
    if exit_code not in (0, 1):
        return [], (folder / "output.txt").read_text(encoding="utf-8")[-2000:]
    caught = []
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        failure = case.find("failure")
        message = "" if failure is None else failure.get("message", "")
        if message.startswith(("assert", "AssertionError")):
            caught.append(case.get("name"))
        elif failure is not None or case.find("error") is not None:
            return [], f"{case.get('name')} broke: {message.splitlines()[0] if message else 'an error'}"
    return caught, ""


def try_mutant(mutant: Mutant, is_alike_checked: bool) -> tuple[bool, str]:
    """Whether the mutant was caught, and the lines to print."""
    begin = time.monotonic()
    if mutant.stale():
        return False, "\n".join(mutant.stale())
    alike = of(mutant.op, "test_matches_reference") if mutant.op else []
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        plant(mutant, Path(name))
        caught, problem = failures(mutant.tests, Path(name))
        if is_alike_checked and alike:
            seen, broken = failures(alike, Path(name))
            problem = problem or broken or ("kernel = reference sees it: " + summary(seen) if seen else "")
    text = f"{mutant.name} ({mutant.kind}, {time.monotonic() - begin:.0f} s): "
    if problem:
        return False, text + problem
    return bool(caught), text + (summary(caught) if caught else "SURVIVED " + ", ".join(mutant.tests))


def summary(tests: list[str]) -> str:
    """Names of tests, each with how many of its cases there are."""
    functions = [name.partition("[")[0] for name in tests]
    cases = {function: [name for name in tests if name.partition("[")[0] == function] for function in functions}
    return ", ".join(names[0] if len(names) == 1 else f"{name} ({len(names)})" for name, names in cases.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m op_tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="names, kinds and ops, without running anything")
    parser.add_argument("--only", metavar="NAME", help="mutants whose name contains this")
    parser.add_argument("--alike", action="store_true", help="also check that kernel = reference does not see them")
    parser.add_argument("--quarter", action="store_true", help="every fourth mutant, those of the day")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.name]
    if options.quarter:
        chosen = chosen[datetime.date.today().toordinal() % 4 :: 4]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its name")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.kind})")
        return 0
    begin, num_caught = time.monotonic(), 0
    with ThreadPoolExecutor(options.jobs, initializer=start_forks) as pool:
        for is_caught, text in pool.map(lambda mutant: try_mutant(mutant, options.alike), chosen):
            num_caught += is_caught
            print(text, flush=True)
    print(f"{num_caught} of {len(chosen)} mutants caught in {time.monotonic() - begin:.0f} s")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
