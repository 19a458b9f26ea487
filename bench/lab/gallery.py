"""Which pictures there are of what was measured, what is said below each, and their files."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..pictures import matplotlib_for, svg_text, write_png
from . import figures
from .records import PLAIN, Setting, by_setting, cell_curves, method_of, preset_curves

# settings that get pictures of their own; of more there are tables
MAX_SETTINGS = 3


class Picture(NamedTuple):
    """name: of its files; what: was measured."""

    name: str
    title: str
    what: str
    caption: str


_OF_A_SETTING = (
    (
        figures.speedup_map,
        "Speed-up over plain decoding",
        "How many times faster than plain decoding, measured in the same run. Blue is faster, orange is slower.",
    ),
    (
        figures.acceptance,
        "Acceptance by domain and depth",
        "How often the first, second, third … drafted token is accepted, at the largest K of each method. A flat line "
        "means that long drafts pay off.",
    ),
    (
        figures.latency,
        "Time before a token",
        "Share of the tokens that arrive within the time below; further left is better. Each method stands for the K "
        "that is fastest on average. Tokens that arrive together share their time; the slowest 1% are cut off.",
    ),
    (
        figures.breakdown,
        "Time of a step",
        "GPU time of each phase, averaged over the domains. “Outside of these” is the rest of the wall-clock time.",
    ),
)
_CROSSING = (
    "A ring marks the batch size from which plain decoding is faster (interpolated between two measured batches)."
)
_ROOFLINE = (
    "Each point is one case of an op; closer to the roof is better. The L2 cache was overwritten before each call. "
    "Times of calls in a row, which the tables hold, are left out: what such a call finds in the cache needs no "
    "memory. The roof is the memory's bandwidth and, on the left, the shortest of all these times."
)


def pictured(cells: Iterable[dict[str, Any]]) -> dict[Setting, list[dict[str, Any]]]:
    """Settings with pictures: those with most cells, of equals the first ones."""
    groups = {
        setting: group
        for setting, group in by_setting(cells).items()
        if any(method_of(cell) != PLAIN for cell in group)
    }
    largest = sorted(groups, key=lambda setting: -len(groups[setting]))[:MAX_SETTINGS]
    return {setting: group for setting, group in groups.items() if setting in largest}


def is_drawable(cells: Sequence[dict], steps: Sequence[Mapping], kernels: Sequence[Mapping]) -> bool:
    """Whether there is any picture; needs no matplotlib."""
    return bool(pictured(cells) or cell_curves(cells) or preset_curves(steps) or cold_kernels(kernels))


def timed_kernels(kernels: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines that say what a case moves, and how fast."""
    return [line for line in kernels if all(line.get(name) for name in ("bytes", "gb_per_s", "share_of_copy"))]


def cold_kernels(kernels: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of them that were also timed with nothing in the L2 cache."""
    return [line for line in timed_kernels(kernels) if line.get("cold_p50_us")]


def draw(
    folder: Path, cells: Sequence[dict], steps: Sequence[Mapping] = (), kernels: Sequence[Mapping] = ()
) -> list[Picture]:
    """Writes every picture as PNG and SVG into the folder; needs matplotlib only where there is something to draw.

    cells: `records.newest_cells`; steps: lines of the generation app; kernels: our newest line of each case, with
    `family` where it is known.
    """
    if not is_drawable(cells, steps, kernels):
        return []
    matplotlib_for("bench.report")
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    for picture, figure in _figures(cells, steps, kernels):
        name = _unused(picture.name, pictures)
        pictures.append(picture._replace(name=name))
        (folder / f"{name}.svg").write_text(svg_text(figure), encoding="utf-8")
        write_png(figure, folder / f"{name}.png")
    return pictures


def _figures(
    cells: Sequence[dict], steps: Sequence[Mapping], kernels: Sequence[Mapping]
) -> Iterator[tuple[Picture, Any]]:
    for setting, group in pictured(cells).items():
        stem = f"{setting.pair}_b{setting.batch_size}_t{setting.temperature:g}"
        for function, title, caption in _OF_A_SETTING:
            picture = Picture(f"{function.__name__}_{stem}", title, str(setting), caption)
            yield picture, function(group, f"{title}\n{setting}")
    of_settings = {
        (f"{setting.pair}_t{setting.temperature:g}", str(setting)): curves
        for setting, curves in cell_curves(cells).items()
    }
    about, title = "random weights, simulated acceptance", "Throughput against batch"
    of_shapes = {(shape, f"shape of {shape}, {about}"): curves for shape, curves in preset_curves(steps).items()}
    for (stem, what), curves in (of_settings | of_shapes).items():
        picture = Picture(f"throughput_{stem}", title, what, _CROSSING)
        yield picture, figures.throughput(curves, f"{title}\n{what}")
    cold = cold_kernels(kernels)
    if cold:
        caption, title, gpu = _ROOFLINE, "Bandwidth of the kernels", str(cold[0].get("gpu", ""))
        if missing := len(timed_kernels(kernels)) - len(cold):
            caption += f" {missing} cases were timed in graphs alone and are left out."
        figure = figures.roofline(cold, f"{title}\n{gpu}, no data in the L2 cache")
        yield Picture("roofline", title, gpu, caption), figure


def _unused(name: str, pictures: Sequence[Picture]) -> str:
    """A file's name, whatever the pair is called."""
    name, taken = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:80], {picture.name for picture in pictures}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
