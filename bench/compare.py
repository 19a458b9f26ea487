"""Compares the results of two commits: `python -m bench.compare OLD NEW --results DIR [--op X] [--case TEXT]`.

Reads what `python -m bench.run --results DIR` has written; the committed results hold no two commits of a case. For
each case that both commits were timed on, on one GPU with one version of torch and triton, it prints the median times,
their ratio (new / old, below 1 is faster) and its range. The range reaches from the fastest new time over the slowest
old one to the reverse: of graphs between the 20th and the 80th percentile of every run, of all other times between
runs. A difference is `noise` if 1 lies in the range, and `one run` if neither percentiles nor a second run tell how
times vary. `python -m bench.in_turn` times two checkouts beside each other, which shows smaller differences. To compare
results honestly, time both commits on one machine in turn, several runs each:

    for i in 1 2 3; do for at in old new; do (cd $at && python -m bench.run --op X --results DIR); done; done

`--graphs` leaves out all times but those of graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from .harness import results
from .harness.markdown import markdown
from .lab.log import read_lines

# what a line tells, by the name of its column
METRICS = {
    "graph": "graph_p50_us",
    "cold": "cold_p50_us",
    "raw": "host_p50_us",
    "public": "public_host_p50_us",
    "step": "step_ms",
}


class Times(NamedTuple):
    """The median over runs, and the fastest and slowest time."""

    middle: float
    low: float
    high: float


class Change(NamedTuple):
    """One metric of one case, at both commits."""

    gpu: str
    op: str
    case: str
    metric: str
    old: Times
    new: Times

    @property
    def ratio(self) -> float:
        return self.new.middle / self.old.middle

    @property
    def range(self) -> tuple[float, float]:
        return self.new.low / self.old.high, self.new.high / self.old.low

    @property
    def verdict(self) -> str:
        if any(times.low == times.high for times in (self.old, self.new)):
            return "one run"
        low, high = self.range
        return "faster" if high < 1 else "slower" if low > 1 else "noise"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("old", metavar="OLD", help="a commit that results were recorded with; abbreviated as you like")
    parser.add_argument("new", metavar="NEW", help="another one")
    parser.add_argument("--op", action="append", help="only this op or app; may be given several times")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--metric", action="append", choices=METRICS, help="only this time; may be given several times")
    parser.add_argument("--provider", default="eagle_kernels", help="whose times")
    parser.add_argument("--results", type=Path, required=True, help="folder of the JSON lines")
    parser.add_argument("--changed", action="store_true", help="leave out what is noise")
    options = parser.parse_args(arguments)
    lines = [
        line
        for file in sorted(options.results.glob("**/*.jsonl"))
        for line in read_lines(file)
        if line.get("provider") == options.provider and options.case in line["case"]
        and (not options.op or line["op"] in options.op)
    ]  # fmt: skip
    old, new = (of_commit(lines, commit) for commit in (options.old, options.new))
    for commit, found in ((options.old, old), (options.new, new)):
        if not found:
            known = sorted({line["commit"] for line in lines})
            print(f"no results of {options.provider} at {commit}; there are some at {', '.join(known) or 'no commit'}")
            return 2
    changes = [change for change in compare(old, new) if not options.metric or change.metric in options.metric]
    if not changes:
        print(f"{options.old} and {options.new} have no case on one GPU, with one torch and triton, in common")
        return 2
    print(report(changes, options.changed))
    return 0


def of_commit(lines: Iterable[dict], commit: str) -> list[dict]:
    """Returns the lines of a commit. It and recorded ones may be abbreviated; `X-dirty` alone takes those so marked."""
    clean = commit.removesuffix("-dirty")
    wanted = results.full_hash(clean) or clean

    def is_wanted(recorded: str) -> bool:
        hash_ = recorded.removesuffix("-dirty")
        is_same_state = (hash_ == recorded) == (clean == commit)
        return bool(hash_) and is_same_state and (wanted.startswith(hash_) or hash_.startswith(wanted))

    return [line for line in lines if is_wanted(line["commit"])]


def compare(old: Sequence[dict], new: Sequence[dict]) -> list[Change]:
    """Returns the change of every metric that lines of both commits tell."""
    before, after = _times(old), _times(new)
    return [
        Change(gpu, op, case, metric, before[key], after[key])
        for key in before
        if key in after
        for gpu, _, op, case, metric in [key]
    ]


def _times(lines: Iterable[dict]) -> dict[tuple, Times]:
    found: dict[tuple, list[tuple[float, float, float]]] = defaultdict(list)
    for line in lines:
        case = " ".join(filter(None, (line.get("section"), line["case"])))
        versions = line.get("versions") or {}
        for metric, name in METRICS.items():
            value = line.get(name)
            if value:
                low, high = (line.get(name.replace("p50", end), value) for end in ("p20", "p80"))
                key = (line["gpu"], (versions.get("torch"), versions.get("triton")), line["op"], case, metric)
                found[key].append((value, low, high))
    return {
        key: Times(median(v for v, _, _ in runs), min(low for _, low, _ in runs), max(high for _, _, high in runs))
        for key, runs in found.items()
    }


def report(changes: Sequence[Change], only_changed: bool = False) -> str:
    """Returns a table of the changes of each GPU, and how many of them are faster, slower, noise."""
    parts = []
    for gpu in dict.fromkeys(change.gpu for change in changes):
        of_gpu = [change for change in changes if change.gpu == gpu]
        table = [["op", "case", "time", "old", "new", "new / old", "range", "verdict"]]
        for change in of_gpu:
            if not (only_changed and change.verdict == "noise"):
                unit = "ms" if change.metric == "step" else "µs"
                low, high = change.range
                table.append([
                    change.op, change.case, f"{change.metric}, {unit}", f"{change.old.middle:.4g}",
                    f"{change.new.middle:.4g}", f"{change.ratio:.3f}", f"{low:.3f} .. {high:.3f}", change.verdict,
                ])  # fmt: skip
        verdicts = [change.verdict for change in of_gpu]
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("faster", "slower", "noise", "one run"))
        middle = median(change.ratio for change in of_gpu)
        parts += [f"{gpu}: {counts}; median ratio {middle:.3f}", *([markdown(table)] if len(table) > 1 else [])]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
