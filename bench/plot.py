"""Draws the sweeps of `python -m bench.run --sweep`: `python -m bench.plot --op verify_tree_sampled [--results DIR]`.

Graph times of the deepest walks with filters, ours beside each other provider, log-log: against B for the trees that
servers run, against N at B = 8. Pictures are written beside the results, `results/<gpu>/<op>_*.png`. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "results"
OURS = "eagle_kernels"
_CASE = re.compile(r"K/S/N=(?P<tree>\d+/\d+/(?P<N>\d+)) B=(?P<B>\d+) (?P<kind>.*)")
_KIND = "top-k 50 top-p 0.9 full depth"

# provider -> [(x, microseconds)] in ascending order
Curves = dict[str, list[tuple[int, float]]]


class Plot(NamedTuple):
    """One picture: `axis` ("B" or "N") of the cases for which `is_wanted` of a case's fields."""

    name: str
    title: str
    axis: str
    is_wanted: Callable[[dict], bool]


PLOTS = {
    "verify_tree_sampled": (
        Plot("batch_n8", "K/S/N = 4/3/8", "B", lambda case: case["tree"] == "4/3/8"),
        Plot("batch_n64", "K/S/N = 8/5/64", "B", lambda case: case["tree"] == "8/5/64"),
        Plot("nodes_b8", "K/S = 8/5, B = 8", "N", lambda case: case["tree"].startswith("8/5/") and case["B"] == "8"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", default="verify_tree_sampled", choices=list(PLOTS), help="name of an op")
    parser.add_argument("--results", default=str(DIRECTORY), help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    try:
        import matplotlib
    except ImportError:
        print("bench.plot needs the package matplotlib, which is not installed: pip install matplotlib")
        return 2
    matplotlib.use("Agg")  # a file, whatever screen there is
    files = sorted(Path(options.results).glob(f"*/{options.op}.jsonl"))
    is_drawn = False
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for plot in PLOTS[options.op]:
            drawn = curves(lines, plot)
            if len(drawn.get(OURS, ())) > 1:
                picture = file.with_name(f"{options.op}_{plot.name}.png")
                _draw(picture, f"{options.op}, {plot.title}, {_KIND}\n{lines[-1]['gpu']}", plot.axis, drawn)
                print(f"wrote {picture}")
                is_drawn = True
    if not is_drawn:
        print(f"no sweep of {options.op} in {options.results}: python -m bench.run --op {options.op} --peers --sweep")
    return 0 if is_drawn else 1


def curves(lines: Sequence[dict], plot: Plot) -> Curves:
    """The curves of a picture. A point is of the newest run in which ours was timed on its case."""
    runs: dict[int, dict[str, dict[str, float]]] = {}
    for line in lines:
        case = _CASE.fullmatch(line["case"])
        if case and case["kind"] == _KIND and plot.is_wanted(case.groupdict()):
            of_size = runs.setdefault(int(case[plot.axis]), {})
            # taken out and put back: the run that was written to last comes last
            of_size[line.get("run")] = {**of_size.pop(line.get("run"), {}), line["provider"]: line["graph_p50_us"]}
    drawn: Curves = {}
    for size, of_size in sorted(runs.items()):
        newest = [times for times in of_size.values() if OURS in times][-1:]
        for provider, time_us in (newest[0] if newest else {}).items():
            drawn.setdefault(provider, []).append((size, time_us))
    return drawn


def _draw(picture: Path, title: str, axis: str, drawn: Curves) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for provider in sorted(drawn, key=lambda name: name != OURS):
        sizes, times = zip(*drawn[provider])
        axes.plot(sizes, times, marker="o", label=provider, linewidth=2.5 if provider == OURS else 1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({size for curve in drawn.values() for size, _ in curve})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel({"B": "requests B", "N": "nodes N"}[axis])
    axes.set_ylabel("µs, graph replay")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
