"""Draws the sweeps of `python -m bench.run --sweep`: `python -m bench.plot [--op verify_tree_sampled] [--results DIR]`.

Graph times, or the bandwidth that is reached, ours beside each other provider, against one size. Pictures are written
beside the results, `results/<gpu>/<op>_*.png`. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import pictures
from .lab.log import read_lines

DIRECTORY = Path(__file__).parent / "results"
OURS = "eagle_kernels"

# provider -> [(size, value)] in ascending order
Curves = dict[str, list[tuple[int, float]]]


class Plot(NamedTuple):
    """One picture: of the cases whose whole name matches `cases`, `value` of the result lines against the group."""

    name: str
    title: str
    cases: str
    axis: str
    value: str = "graph_p50_us"


_LABELS = {"graph_p50_us": "µs, graph replay", "gb_per_s": "GB/s, graph replay"}
_FILTERS = "top-k 50 top-p 0.9 full depth"

PLOTS = {
    "gqa_decode": tuple(
        Plot(f"length_b{batch_size}", f"B = {batch_size}, pages of 16, 32 heads, 8 of keys and values of 128",
             rf"B={batch_size} L=(\d+) page 16 heads 32/8/128", "keys of a request", "gb_per_s")
        for batch_size in (1, 8, 32)
    ),
    "verify_tree_sampled": (
        Plot("batch_n8", f"K/S/N = 4/3/8, {_FILTERS}", rf"K/S/N=4/3/8 B=(\d+) {_FILTERS}", "requests B"),
        Plot("batch_n64", f"K/S/N = 8/5/64, {_FILTERS}", rf"K/S/N=8/5/64 B=(\d+) {_FILTERS}", "requests B"),
        Plot("nodes_b8", f"K/S = 8/5, B = 8, {_FILTERS}", rf"K/S/N=8/5/(\d+) B=8 {_FILTERS}", "nodes N"),
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", choices=list(PLOTS), help="name of an op; by default all that have sweeps")
    parser.add_argument("--results", default=str(DIRECTORY), help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    try:
        pictures.matplotlib_for("bench.plot")
    except pictures.MissingMatplotlib as error:
        print(error)
        return 2
    drawn_ops = set()
    for op in [options.op] if options.op else PLOTS:
        for file in sorted(Path(options.results).glob(f"*/{op}.jsonl")):
            lines = read_lines(file)
            for plot in PLOTS[op]:
                drawn = curves(lines, plot)
                if len(drawn.get(OURS, ())) > 1:
                    picture = file.with_name(f"{op}_{plot.name}.png")
                    _draw(picture, f"{op}, {plot.title}\n{lines[-1]['gpu']}", plot, drawn)
                    print(f"wrote {picture}")
                    drawn_ops.add(op)
    for op in {options.op} - {None} - drawn_ops:
        print(f"no sweep of {op} in {options.results}: python -m bench.run --op {op} --peers --sweep")
    return 0 if drawn_ops else 1


def curves(lines: Sequence[dict], plot: Plot) -> Curves:
    """The curves of a picture. A point is of the newest run in which ours was timed on its case."""
    runs: dict[int, dict[str, dict[str, float]]] = {}
    for line in lines:
        case = re.fullmatch(plot.cases, line["case"])
        if case:
            of_size = runs.setdefault(int(case[1]), {})
            # taken out and put back: the run that was written to last comes last
            of_size[line.get("run")] = {**of_size.pop(line.get("run"), {}), line["provider"]: line[plot.value]}
    drawn: Curves = {}
    for size, of_size in sorted(runs.items()):
        newest = [values for values in of_size.values() if OURS in values][-1:]
        for provider, value in (newest[0] if newest else {}).items():
            drawn.setdefault(provider, []).append((size, value))
    return drawn


def _draw(picture: Path, title: str, plot: Plot, drawn: Curves) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for provider in sorted(drawn, key=lambda name: name != OURS):
        sizes, values = zip(*drawn[provider])
        axes.plot(sizes, values, marker="o", label=provider, linewidth=2.5 if provider == OURS else 1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if plot.value.endswith("_us") else "linear")
    ticks = sorted({size for curve in drawn.values() for size, _ in curve})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel(plot.axis)
    axes.set_ylabel(_LABELS[plot.value])
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(picture, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
