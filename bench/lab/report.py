"""The page and the pictures of one folder of results, and what is said below each picture."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.markdown import markdown
from ..pictures import MissingMatplotlib, matplotlib_for, svg_text, write_png
from . import figures, records
from .tables import LEGEND, cell_table

PAGE, FIGURES = "report.md", "figures"
_INTRODUCTION = """\
Speculative decoding drafts several tokens cheaply and lets the target model check them all in one step; plain decoding
takes one step for each token. A speed-up of 2× means twice the tokens per second of plain decoding."""
_OF_THE_FASTEST = (
    "pair", "domain", "batch", "temperature", "method", "K", "tokens/s", "speed-up", "tokens a step", "prompts",
    "machine",
)  # fmt: skip
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


def pictured(cells: Iterable[dict[str, Any]]) -> dict[records.Setting, list[dict[str, Any]]]:
    """Settings with pictures: those with most cells, of equals the first ones."""
    groups = {
        setting: group
        for setting, group in records.by_setting(cells).items()
        if any(records.method_of(cell) != records.PLAIN for cell in group)
    }
    largest = sorted(groups, key=lambda setting: -len(groups[setting]))[:MAX_SETTINGS]
    return {setting: group for setting, group in groups.items() if setting in largest}


def is_drawable(cells: Sequence[dict], steps: Sequence[Mapping], kernels: Sequence[Mapping]) -> bool:
    """Whether there is any picture; needs no matplotlib."""
    return bool(pictured(cells) or records.cell_curves(cells) or records.preset_curves(steps) or cold_kernels(kernels))


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
        for setting, curves in records.cell_curves(cells).items()
    }
    about, title = "random weights, simulated acceptance", "Throughput against batch"
    shapes = records.preset_curves(steps)
    of_shapes = {(shape, f"shape of {shape}, {about}"): curves for shape, curves in shapes.items()}
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


def write_page(
    folder: Path,
    cells: Sequence[dict[str, Any]],
    steps: Sequence[Mapping[str, Any]] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Writes `report.md` and `figures/` into the folder, and says so; without matplotlib there are no pictures.

    Arguments as in `draw`.
    """
    pictures, reason = [], ""
    try:
        pictures = draw(folder / FIGURES, cells, steps, kernels)
        if not pictures:
            reason = "There are no pictures: nothing was measured that one could show."
    except MissingMatplotlib as error:
        reason = f"There are no pictures: {error}"
    curves = records.preset_curves(steps)
    steps = [line for line in records.newest_steps(steps) if line["shape"] in curves]
    sources = [*cells, *steps, *timed_kernels(kernels)]
    machines = dict.fromkeys(str(line["gpu"]) for line in sources if line.get("gpu"))
    title = f"# Speculative decoding on {', '.join(machines) or 'an unknown machine'}"
    parts = [title, _INTRODUCTION, *_notes(cells, sources, bool(pictures)), reason]
    for picture in pictures:
        parts += [f"## {picture.title}", f"{picture.what}. {picture.caption}"]
        parts += [f"![{picture.title}]({FIGURES}/{picture.name}.svg)"]
    if best := _fastest_cells(cells):
        shared, table = cell_table(best, _OF_THE_FASTEST)
        parts += ["## Fastest method for each domain", shared, markdown(table)]
    if cells:
        shared, table = cell_table(cells)
        about = "Each row is one configuration: all prompts of its domain, all runs."
        parts += ["## Every experiment cell", f"{about} {shared}", LEGEND, markdown(table)]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return f"wrote {page} and {folder / FIGURES}" if pictures else f"wrote {page}. {reason}"


def _fastest_cells(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pair, setting and domain."""
    found = []
    for group in records.by_setting(cells).values():
        for domain in records.distinct(group, "prompt_domain"):
            found.append(records.fastest(cell for cell in group if cell["config"]["prompt_domain"] == domain))
    return list(filter(None, found))


def _notes(cells: Sequence[dict[str, Any]], sources: Sequence[Mapping[str, Any]], has_pictures: bool) -> list[str]:
    """What a reader must know before any number."""
    notes = []
    drafted = [cell for cell in cells if records.method_of(cell) != records.PLAIN]
    best = records.fastest(drafted)
    if best is not None:
        domain = best["config"]["prompt_domain"]
        name, speedup = records.label_of(best), best["speedup"]
        notes.append(f"Fastest of all: {name} on {domain}, {speedup:.2f}× over plain decoding.")
    greedy = [cell for cell in drafted if cell["config"]["temperature"] == 0]
    parted = [cell for cell in greedy if cell.get("identical", 1.0) != 1.0]
    if greedy:
        all_same = f"All {len(greedy)} greedy cells give exactly the text of plain decoding, token for token."
        some_differ = f"{len(parted)} of {len(greedy)} greedy cells give some text that differs from plain decoding's."
        notes.append(some_differ if parted else all_same)
    dirty = sum(str(line.get("commit")).endswith("-dirty") for line in sources)
    if dirty:
        notes.append(f"{dirty} of these numbers were measured with uncommitted changes (“-dirty” after the commit).")
    count, drawn = len(records.by_setting(cells)), len(pictured(cells))
    if has_pictures and count > drawn == MAX_SETTINGS:
        notes.append(f"Pictures show {drawn} of {count} settings, those with the most cells; the tables show all.")
    return notes
