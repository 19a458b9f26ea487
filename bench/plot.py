"""Draws the sweeps of `python -m bench.run --sweep`: `python -m bench.plot [--op verify_tree_sampled] [--results DIR]`.

Graph times, or the bandwidth that is reached, ours beside each other provider, against one size. Pictures are written
beside the results, `results/<gpu>/<op>_*.png`. Needs matplotlib.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .harness import results
from .harness.declaration import Case, declared
from .pictures import MARKERS, PALETTE, MissingMatplotlib, in_style, matplotlib_for, new_figure, write_png
from .report import OURS, Row, newest_rows

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
    parser.add_argument("--results", default=str(results.DIRECTORY), help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    try:
        matplotlib_for("bench.plot")
    except MissingMatplotlib as error:
        print(error)
        return 2
    drawn_ops, wanted = set(), [options.op] if options.op else PLOTS
    for benchmark in (benchmark for benchmark in declared() if benchmark.op in wanted):
        for file in sorted(Path(options.results).glob(f"*/{benchmark.op}.jsonl")):
            rows = newest_rows(file, (*benchmark.cases, *benchmark.sweep))
            for plot in PLOTS[benchmark.op]:
                drawn = curves(rows, plot)
                if len(drawn.get(OURS, ())) > 1:
                    picture = file.with_name(f"{benchmark.op}_{plot.name}.png")
                    write_png(_drawn(f"{benchmark.op}, {plot.title}\n{rows[-1][1][OURS]['gpu']}", plot, drawn), picture)
                    print(f"wrote {picture}")
                    drawn_ops.add(benchmark.op)
    for op in {options.op} - {None} - drawn_ops:
        print(f"no sweep of {op} in {options.results}: python -m bench.run --op {op} --peers --sweep")
    return 0 if drawn_ops else 1


def curves(rows: Iterable[tuple[Case, Row]], plot: Plot) -> Curves:
    """Returns the curves of a picture: a point of each provider for every case that is drawn."""
    drawn: Curves = {}
    for case, row in rows:
        if found := re.fullmatch(plot.cases, case.name):
            for provider, line in row.items():
                drawn.setdefault(provider, []).append((int(found[1]), line[plot.value]))
    return {provider: sorted(points) for provider, points in drawn.items()}


@in_style
def _drawn(title: str, plot: Plot, drawn: Curves):
    figure = new_figure(4.5, 7)
    axes = figure.subplots()
    for place, provider in enumerate(sorted(drawn, key=lambda name: name != OURS)):
        look = {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}
        axes.plot(*zip(*drawn[provider]), label=provider, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if plot.value.endswith("_us") else "linear")
    ticks = sorted({size for curve in drawn.values() for size, _ in curve})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel(plot.axis)
    axes.set_ylabel(_LABELS[plot.value])
    axes.set_title(title)
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
