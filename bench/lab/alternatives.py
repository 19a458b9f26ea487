"""What a picture says, in words, for readers who do not see it: a sentence or two with the numbers that matter."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import cold_gb_per_s, roof
from .records import PLAIN, Curves, crossover, distinct, fastest_labels, is_number, label_of, method_of

Cells = Sequence[dict[str, Any]]


def speedup_map(cells: Cells) -> str:
    known = [cell for cell in cells if method_of(cell) != PLAIN and is_number(cell["speedup"])]
    if not known:
        return "Heat map without any number."
    ends = [pick(known, key=lambda cell: cell["speedup"]) for pick in (max, min)]
    high, low = (f"{cell['speedup']:.2f}× for {cell['config']['prompt_domain']}, {label_of(cell)}" for cell in ends)
    return f"Heat map by domain, method and K. Largest speed-up: {high}. Smallest: {low}."


def acceptance(cells: Cells) -> str:
    deepest: dict[str, dict[str, list[float]]] = {}
    for cell in cells:  # K ascends
        if method_of(cell) != PLAIN and cell.get("accepted_per_depth"):
            deepest.setdefault(method_of(cell), {})[cell["config"]["prompt_domain"]] = cell["accepted_per_depth"]
    said = []
    for method, of_domain in deepest.items():
        depth = max(map(len, of_domain.values()))
        ends = [statistics.fmean(shares[end] for shares in of_domain.values()) for end in (0, -1)]
        said.append(f"{method}, {ends[0]:.0%} at depth 1 and {ends[1]:.0%} at depth {depth}")
    return f"Line charts, one for each method. Accepted in the mean of the domains: {_listed(said)}."


def latency(cells: Cells) -> str:
    shown, said = fastest_labels(cells), []
    for domain in distinct(cells, "prompt_domain"):
        medians = {
            label_of(cell): (cell.get("inter_token_ms") or [None] * 101)[50]
            for cell in cells
            if cell["config"]["prompt_domain"] == domain and label_of(cell) in shown
        }
        of_label = [f"{label} {value:.3g} ms" for label, value in medians.items() if is_number(value)]
        said.append(f"{domain}: {', '.join(of_label) or 'none'}")
    return f"Cumulative curves, one chart for each domain. Medians: {_listed(said)}."


def breakdown(cells: Cells) -> str:
    steps: dict[str, list[float]] = {}
    for cell in cells:
        if cell.get("phase_ms") and is_number(cell.get("step_ms")):
            steps.setdefault(label_of(cell), []).append(cell["step_ms"])
    said = [f"{label} {statistics.fmean(times):.3g} ms" for label, times in steps.items()]
    return f"Stacked bars by phase. A step takes: {_listed(said)}."


def throughput(curves: Curves) -> str:
    said = []
    for name, curve in curves.items():
        first, last = min(curve), max(curve)
        met = crossover(curve, curves[PLAIN]) if name != PLAIN else None
        overtaken = f", overtaken by plain decoding at {met[0]:.3g}" if met else ""
        said.append(f"{name} from {curve[first]:.0f} tokens/s at {first} to {curve[last]:.0f} at {last}{overtaken}")
    return f"Line chart over the requests in a batch: {_listed(said)}."


def roofline(lines: Sequence[Mapping[str, Any]]) -> str:
    best = max(lines, key=cold_gb_per_s)
    name, ceiling = roof(lines)
    return (
        f"Scatter plot of {len(lines)} cases: bandwidth against bytes moved. Roof: {name}, {ceiling:.0f} GB/s. Highest "
        f"point: {cold_gb_per_s(best):.0f} GB/s, {best['op']}."
    )


def _listed(said: Sequence[str]) -> str:
    return "; ".join(said) or "none"
