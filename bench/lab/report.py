"""Writes the page and the pictures of one folder of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .gallery import MAX_SETTINGS, draw, pictured, timed_kernels
from .page import render
from .records import PLAIN, by_setting, method_of, newest_steps, preset_curves
from .tables import best_table, cell_table, kernel_table, provenance_table, throughput_table

PAGE, FIGURES = "report.html", "figures"


def write_page(
    folder: Path,
    cells: Sequence[dict[str, Any]],
    steps: Sequence[Mapping[str, Any]] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """`report.html` and `figures/` in the folder; arguments as in `gallery.draw`. Needs matplotlib."""
    pictures = draw(folder / FIGURES, cells, steps, kernels)
    timed = timed_kernels(kernels)
    curves = preset_curves(steps)
    shown = [line for line in newest_steps(steps) if line["shape"] in curves]
    sources = [*cells, *shown, *timed]
    tables = [best_table(cells), cell_table(cells)]
    tables += [throughput_table(shape, of_shape) for shape, of_shape in curves.items()]
    tables += [kernel_table(timed), provenance_table(sources)]
    machines = dict.fromkeys(str(line["gpu"]) for line in sources if line.get("gpu"))
    counts = {"cells of an experiment": len(cells), "steps of the engine": len(shown), "cases of kernels": len(timed)}
    about = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    title = f"Speculative decoding on {', '.join(machines) or 'an unknown machine'}"
    page = folder / PAGE
    page.write_text(render(title, about, tables, pictures, _notes(cells, sources)), encoding="utf-8")
    return page


def _notes(cells: Sequence[dict[str, Any]], sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before any number."""
    notes = []
    greedy = [cell for cell in cells if method_of(cell) != PLAIN and cell["config"]["temperature"] == 0]
    parted = [cell for cell in greedy if cell.get("identical", 1.0) != 1.0]
    if greedy:
        all_same = f"In all {len(greedy)} greedy cells the text is plain decoding's, token for token."
        notes.append(
            f"In {len(parted)} of {len(greedy)} greedy cells some text is not plain decoding's." if parted else all_same
        )
    dirty = sum(str(line.get("commit")).endswith("-dirty") for line in sources)
    if dirty:
        notes.append(f"{dirty} of these numbers were measured in a checkout that differed from its commit.")
    count, drawn = len(by_setting(cells)), len(pictured(cells))
    if count > drawn and drawn == MAX_SETTINGS:
        notes.append(f"Pictures show {drawn} of {count} settings, those with most cells; the tables have all.")
    return notes
