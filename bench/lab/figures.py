"""Pictures of an experiment, of throughput and of kernels: each a function from records to a figure."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..pictures import BLUE, INK, MARKERS, PALETTE, PAPER, VERMILION, in_style, new_figure
from .config import METHODS
from .records import PLAIN, Curves, crossover, distinct, fastest_labels, is_number, label_of, method_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = ("draft", "verify", "sample", "bookkeeping")
OUTSIDE = "outside of these"
# of the GPUs with results. torch's large copy is no roof: on the H200 kernels of ours are 1.4 times as fast
MEMORY_GB_PER_S = {"NVIDIA H100 80GB HBM3": 3350.0, "NVIDIA H200": 4800.0}
_ROW, _PANEL, _TITLE, _FOOT = 0.26, 1.5, 0.76, 0.45  # inches
Cells = Sequence[dict[str, Any]]


@in_style
def speedup_map(cells: Cells, title: str) -> Figure:
    """Domain and method against K, in one setting; blue is faster than plain decoding, vermilion slower."""
    from matplotlib.colors import LinearSegmentedColormap

    known = {
        (cell["config"]["prompt_domain"], method_of(cell), cell["config"]["K"]): cell["speedup"]
        for cell in cells
        if method_of(cell) != PLAIN and is_number(cell["speedup"]) and cell["speedup"] > 0
    }
    rows = list(dict.fromkeys((domain, method) for domain, method, _ in known))
    columns = sorted({count for _, _, count in known})
    logs = [[math.log2(known.get((*row, count), math.nan)) for count in columns] for row in rows]
    # as far below 1 as above it, so that the middle colour is 1
    reach = max([0.1, *(abs(math.log2(value)) for value in known.values())])
    axes = _panels(_ROW * max(1, len(rows)), 1, title, left=1.75)[0]
    colours = LinearSegmentedColormap.from_list("speed-up", [VERMILION, "#ffffff", BLUE])
    if known:
        axes.pcolormesh(logs, cmap=colours, vmin=-reach, vmax=reach, edgecolors=PAPER, linewidth=1.5)
    for (domain, method, count), value in known.items():
        x, y = columns.index(count), rows.index((domain, method))
        # not the page's ink and paper, which change places at night: the colour below does not
        letters = "#000000" if abs(logs[y][x]) < 0.75 * reach else "#ffffff"
        axes.text(x + 0.5, y + 0.5, f"{value:.2f}×", ha="center", va="center", fontsize=8, color=letters)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [str(count) for count in columns])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [f"{_short(domain)} · {method}" for domain, method in rows])
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.set_xlabel("K, tokens drafted ahead")
    return axes.figure


@in_style
def acceptance(cells: Cells, title: str) -> Figure:
    """A panel of each method, at its largest K: share of the steps that accept the draft at a depth, by domain."""
    deepest: dict[str, dict[str, dict]] = {}
    for cell in cells:  # K ascends
        if method_of(cell) != PLAIN and cell.get("accepted_per_depth"):
            deepest.setdefault(method_of(cell), {})[cell["config"]["prompt_domain"]] = cell
    domains = distinct(cells, "prompt_domain")
    count = max(1, len(deepest))
    panels = _panels(_PANEL * count, count, title, foot=_FOOT + 0.25)
    for axes, (method, of_domain) in zip(panels, deepest.items()):
        depth = max(cell["config"]["K"] for cell in of_domain.values())
        for domain, cell in of_domain.items():
            shares = cell["accepted_per_depth"]
            place = domains.index(domain)
            axes.plot(range(1, len(shares) + 1), shares, label=_short(domain), **_look(place))
        axes.set_ylim(0, 1.03)
        axes.set_ylabel("share of steps")
        axes.set_title(f"{method} K={depth}", loc="left", pad=3)
        axes.locator_params(axis="x", integer=True)
    panels[-1].set_xlabel("depth: which drafted token, 1 is the first")
    _legend(panels)
    return panels[0].figure


@in_style
def latency(cells: Cells, title: str) -> Figure:
    """A panel of each domain: the distribution of the time before a token, plainly and at each method's fastest K."""
    domains, shown = distinct(cells, "prompt_domain"), fastest_labels(cells)
    foot = _FOOT + 0.1 + 0.2 * math.ceil(len(shown) / 4)
    panels = _panels(_PANEL * len(domains), len(domains), title, foot=foot)
    longest = 0.0
    for axes, domain in zip(panels, domains):
        for cell in cells:
            times_ms = cell.get("inter_token_ms") or []
            is_here = cell["config"]["prompt_domain"] == domain and label_of(cell) in shown
            if is_here and len(times_ms) == 101 and all(map(is_number, times_ms)):
                look = _look_of(method_of(cell)) | {"marker": ""}
                axes.plot(times_ms, [q / 100 for q in range(101)], label=label_of(cell), **look)
                longest = max(longest, times_ms[99])
        axes.set_ylim(0, 1.03)
        axes.set_ylabel("share of tokens")
        axes.set_title(_short(domain), loc="left", pad=3)
    panels[-1].set_xlim(0, 1.05 * longest or 1)  # one slow token would press all else together
    panels[-1].set_xlabel("time before a token, ms")
    _legend(panels)
    return panels[0].figure


@in_style
def breakdown(cells: Cells, title: str) -> Figure:
    """Time of a step by phase, mean of the domains; what is left of its wall time lies outside of the phases."""
    groups: dict[str, list[dict]] = {}
    for cell in cells:
        if cell.get("phase_ms") and is_number(cell.get("step_ms")):
            groups.setdefault(label_of(cell), []).append(cell)
    parts = {label: _phase_means(group) for label, group in groups.items()}
    names = list(dict.fromkeys(name for of_phase in parts.values() for name in of_phase))
    axes = _panels(0.1 + _ROW * max(1, len(parts)), 1, title, left=1.25, foot=_FOOT + 0.45)[0]
    ends = [0.0] * len(parts)
    colours = dict(zip((*PHASES, OUTSIDE), (PALETTE[0], PALETTE[3], PALETTE[2], PALETTE[4], "#8c959f")))
    for name in names:
        widths = [of_phase.get(name, 0.0) for of_phase in parts.values()]
        axes.barh(range(len(parts)), widths, left=ends, height=0.72, label=name, color=colours.get(name, PALETTE[5]))
        ends = [end + width for end, width in zip(ends, widths)]
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of a step, ms")
    _legend([axes], columns=3)
    return axes.figure


@in_style
def throughput(curves: Curves, title: str) -> Figure:
    """Tokens a second against requests of a batch; a ring where plain decoding overtakes, its batch in the legend."""
    from matplotlib.ticker import LogLocator

    axes = _panels(2.34, 1, title, left=0.75, foot=_FOOT + 0.65)[0]
    names = [PLAIN, *(name for name in curves if name != PLAIN)]
    for place, name in enumerate(names):
        look = _look(place - 1) if place else _look_of(PLAIN)
        met = crossover(curves[name], curves[PLAIN]) if place else None
        label = f"{name}, crosses at {met[0]:.3g}" if met else name
        axes.plot(list(curves[name]), list(curves[name].values()), label=label, **look)
        if met:
            ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": look["color"]}
            axes.plot(*([value] for value in met), linestyle="none", gid=f"crossover-{place}", zorder=5, **ring)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for curve in curves.values() for size in curve})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(_units)
    axes.set_xlabel("requests in a batch")
    axes.set_ylabel("tokens/s")
    _legend([axes], columns=2)
    return axes.figure


@in_style
def roofline(lines: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Bandwidth that each case of our kernels reaches, from a cold cache, against the bytes that it must move.

    The roof: the memory's bandwidth, and, for what is small, the shortest of all these times.
    """
    axes = _panels(2.69, 1, title, left=0.75, foot=_FOOT + 0.7)[0]
    families = list(dict.fromkeys(line.get("family", "ops") for line in lines))
    for place, family in enumerate(families):
        points = [(line["bytes"], cold_gb_per_s(line)) for line in lines if line.get("family", "ops") == family]
        look = _look(place, linestyle="none") | {"markersize": 3.5, "alpha": 0.75}
        axes.plot(*zip(*points), label=family, **look)
    name, ceiling = roof(lines)
    sizes = [line["bytes"] for line in lines]
    shortest_us = min(line["cold_p50_us"] for line in lines)
    knee = ceiling * shortest_us * 1e3
    ends = sorted({min(sizes), min(max(knee, min(sizes)), max(sizes)), max(sizes)})
    heights = [min(ceiling, size / shortest_us / 1e3) for size in ends]
    axes.plot(ends, heights, color=INK, label=f"{name}, {ceiling:.0f} GB/s", gid="roof")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _units(value) + "B")
    axes.yaxis.set_major_formatter(_units)
    axes.set_xlabel("bytes that a call must move")
    axes.set_ylabel("GB/s, L2 cache overwritten before")
    _legend([axes], columns=3)
    return axes.figure


def cold_gb_per_s(line: Mapping[str, Any]) -> float:
    """What a call reaches that finds nothing in the L2 cache: with a warm one, data up to its size need no memory."""
    return line["bytes"] / line["cold_p50_us"] / 1e3


def roof(lines: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """What the memory of the GPU gives, in GB/s, by its data sheet; of other GPUs the fastest large read or copy."""
    if (known := MEMORY_GB_PER_S.get(lines[0].get("gpu"))) is not None:
        return "memory by its data sheet", known
    # a share is rounded: the largest one tells the copy best
    best = max(lines, key=lambda line: line["share_of_copy"])
    measured = {"large copy": best["gb_per_s"] / best["share_of_copy"]}
    if reads := [line["read_gb_per_s"] for line in lines if is_number(line.get("read_gb_per_s"))]:
        measured["large read"] = statistics.median(reads)
    return max(measured.items(), key=lambda each: each[1])


def _phase_means(group: Cells) -> dict[str, float]:
    names = list(dict.fromkeys(name for cell in group for name in cell["phase_ms"]))
    means = {name: statistics.fmean(cell["phase_ms"].get(name, 0.0) for cell in group) for name in names}
    rest = statistics.fmean(cell["step_ms"] for cell in group) - sum(means.values())
    return means | {OUTSIDE: max(0.0, rest)}


def _look(place: int, **changes: Any) -> dict[str, Any]:
    """A colour and a marker: never a colour alone."""
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]} | changes


def _look_of(method: str) -> dict[str, Any]:
    if method == PLAIN:
        return {"color": INK, "linestyle": "--", "marker": "."}
    place = list(METHODS).index(method) if method in METHODS else len(METHODS)
    return _look(place, linestyle=("-", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), ":")[place])


def _units(value: float, _place: Any = None) -> str:
    """1k for 1000: matplotlib's own labels of powers are formulas, and names must not be read as such."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _panels(body: float, count: int, title: str, *, left: float = 0.65, foot: float = _FOOT) -> list[Axes]:
    """Below each other with one x axis, in `body` inches. Places are in inches, too: a layout engine would take longer
    than all the rest."""
    figure = new_figure(_TITLE + body + foot)
    width, height = figure.get_size_inches()
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left / width, foot / height, 1 - 0.2 / width, 1 - _TITLE / height, hspace=0.28)
    heading, _, about = title.partition("\n")
    figure.text(0.12 / width, 1 - 0.08 / height, heading, va="top", fontweight="bold")
    figure.text(0.12 / width, 1 - 0.25 / height, textwrap.fill(about, 76), va="top", fontsize=7.5)
    return list(panels)


def _legend(panels: Sequence[Axes], columns: int = 4) -> None:
    """Below all panels, each name once."""
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    if handles:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 0.2}
        panels[0].figure.legend(handles.values(), handles, ncols=columns, columnspacing=1.0, handlelength=1.6, **place)
