"""Writes the page and the pictures of one folder of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..pictures import MissingMatplotlib
from .gallery import MAX_SETTINGS, draw, pictured, timed_kernels
from .page import render
from .records import PLAIN, by_setting, fastest, label_of, method_of, newest_steps, preset_curves
from .tables import best_table, cell_table, kernel_table, provenance_table, throughput_table

PAGE, FIGURES = "report.html", "figures"


_INTRODUCTION = (
    "Speculative decoding drafts several tokens cheaply and lets the target model check them all in one step; plain "
    "decoding takes one step for each token. A speed-up of 2× means twice the tokens per second of plain decoding."
)


class Written(NamedTuple):
    """The files; figures: None where the page has no pictures, and then `reason` says why."""

    page: Path
    figures: Path | None
    reason: str = ""

    def __str__(self) -> str:
        return f"wrote {self.page} and {self.figures}" if self.figures else f"wrote {self.page}. {self.reason}"


def write_page(
    folder: Path,
    cells: Sequence[dict[str, Any]],
    steps: Sequence[Mapping[str, Any]] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
) -> Written:
    """`report.html` and `figures/` in the folder; arguments as in `gallery.draw`. Without matplotlib: no pictures."""
    pictures, reason = [], ""
    try:
        pictures = draw(folder / FIGURES, cells, steps, kernels)
        if not pictures:
            reason = "There are no pictures: nothing was measured that one could show."
    except MissingMatplotlib as error:
        reason = f"There are no pictures: {error}"
    timed = timed_kernels(kernels)
    curves = preset_curves(steps)
    shown = [line for line in newest_steps(steps) if line["shape"] in curves]
    sources = [*cells, *shown, *timed]
    tables = [best_table(cells), *(throughput_table(shape, of_shape) for shape, of_shape in curves.items())]
    tables += [cell_table(cells), kernel_table(timed), provenance_table(sources)]
    machines = dict.fromkeys(str(line["gpu"]) for line in sources if line.get("gpu"))
    counts = {"experiment cell": len(cells), "engine measurement": len(shown), "kernel timing": len(timed)}
    about = ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count)
    title = f"Speculative decoding on {', '.join(machines) or 'an unknown machine'}"
    page = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    notes = [_INTRODUCTION, *_notes(cells, sources, bool(pictures)), *filter(None, [reason])]
    page.write_text(render(title, about, tables, pictures, notes), encoding="utf-8")
    return Written(page, folder / FIGURES if pictures else None, reason)


def _notes(cells: Sequence[dict[str, Any]], sources: Sequence[Mapping[str, Any]], has_pictures: bool) -> list[str]:
    """What a reader must know before any number."""
    notes = []
    drafted = [cell for cell in cells if method_of(cell) != PLAIN]
    best = fastest(drafted)
    if best is not None:
        domain = best["config"]["prompt_domain"]
        notes.append(f"Fastest of all: {label_of(best)} on {domain}, {best['speedup']:.2f}× over plain decoding.")
    greedy = [cell for cell in cells if method_of(cell) != PLAIN and cell["config"]["temperature"] == 0]
    parted = [cell for cell in greedy if cell.get("identical", 1.0) != 1.0]
    if greedy:
        all_same = f"All {len(greedy)} greedy cells give exactly the text of plain decoding, token for token."
        some_differ = f"{len(parted)} of {len(greedy)} greedy cells give some text that differs from plain decoding's."
        notes.append(some_differ if parted else all_same)
    dirty = sum(str(line.get("commit")).endswith("-dirty") for line in sources)
    if dirty:
        notes.append(f"{dirty} of these numbers were measured with uncommitted changes (“-dirty” behind the commit).")
    count, drawn = len(by_setting(cells)), len(pictured(cells))
    if has_pictures and count > drawn == MAX_SETTINGS:
        notes.append(f"Pictures show {drawn} of {count} settings, those with the most cells; the tables show all.")
    return notes
