"""Writes the page and the pictures of one folder of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.markdown import markdown
from ..pictures import MissingMatplotlib
from .gallery import MAX_SETTINGS, draw, pictured, timed_kernels
from .records import PLAIN, by_setting, distinct, fastest, label_of, method_of, newest_steps, preset_curves
from .tables import LEGEND, cell_table

PAGE, FIGURES = "report.md", "figures"
_INTRODUCTION = """\
Speculative decoding drafts several tokens cheaply and lets the target model check them all in one step; plain decoding
takes one step for each token. A speed-up of 2× means twice the tokens per second of plain decoding."""
_OF_THE_FASTEST = (
    "pair", "domain", "batch", "temperature", "method", "K", "tokens/s", "speed-up", "tokens a step", "prompts",
    "machine",
)  # fmt: skip


def write_page(
    folder: Path,
    cells: Sequence[dict[str, Any]],
    steps: Sequence[Mapping[str, Any]] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Writes `report.md` and `figures/` into the folder, and says so; without matplotlib there are no pictures.

    Arguments as in `gallery.draw`.
    """
    pictures, reason = [], ""
    try:
        pictures = draw(folder / FIGURES, cells, steps, kernels)
        if not pictures:
            reason = "There are no pictures: nothing was measured that one could show."
    except MissingMatplotlib as error:
        reason = f"There are no pictures: {error}"
    curves = preset_curves(steps)
    sources = [*cells, *(line for line in newest_steps(steps) if line["shape"] in curves), *timed_kernels(kernels)]
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
    for group in by_setting(cells).values():
        for domain in distinct(group, "prompt_domain"):
            found.append(fastest(cell for cell in group if cell["config"]["prompt_domain"] == domain))
    return list(filter(None, found))


def _notes(cells: Sequence[dict[str, Any]], sources: Sequence[Mapping[str, Any]], has_pictures: bool) -> list[str]:
    """What a reader must know before any number."""
    notes = []
    drafted = [cell for cell in cells if method_of(cell) != PLAIN]
    best = fastest(drafted)
    if best is not None:
        domain = best["config"]["prompt_domain"]
        notes.append(f"Fastest of all: {label_of(best)} on {domain}, {best['speedup']:.2f}× over plain decoding.")
    greedy = [cell for cell in drafted if cell["config"]["temperature"] == 0]
    parted = [cell for cell in greedy if cell.get("identical", 1.0) != 1.0]
    if greedy:
        all_same = f"All {len(greedy)} greedy cells give exactly the text of plain decoding, token for token."
        some_differ = f"{len(parted)} of {len(greedy)} greedy cells give some text that differs from plain decoding's."
        notes.append(some_differ if parted else all_same)
    dirty = sum(str(line.get("commit")).endswith("-dirty") for line in sources)
    if dirty:
        notes.append(f"{dirty} of these numbers were measured with uncommitted changes (“-dirty” after the commit).")
    count, drawn = len(by_setting(cells)), len(pictured(cells))
    if has_pictures and count > drawn == MAX_SETTINGS:
        notes.append(f"Pictures show {drawn} of {count} settings, those with the most cells; the tables show all.")
    return notes
