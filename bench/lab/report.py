"""Writes the page and the pictures of one folder of results."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..pictures import MissingMatplotlib
from .gallery import MAX_SETTINGS, Picture, draw, pictured, timed_kernels
from .records import PLAIN, by_setting, fastest, label_of, method_of, newest_steps, preset_curves
from .tables import Table, best_table, cell_table, throughput_table

PAGE, FIGURES = "report.html", "figures"
# a longer table is closed until somebody opens it
MOST_OPEN = 30
_INTRODUCTION = (
    "Speculative decoding drafts several tokens cheaply and lets the target model check them all in one step; plain "
    "decoding takes one step for each token. A speed-up of 2× means twice the tokens per second of plain decoding."
)
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 75rem; margin: 1rem auto; padding: 0 1rem }
figure { display: inline-block; max-width: 100%; margin: 0 1rem 1rem 0; vertical-align: top }
figcaption { max-width: 30rem }
img { max-width: 100% }
.box { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #8886; text-align: left; white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
"""


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
    curves = preset_curves(steps)
    sources = [*cells, *(line for line in newest_steps(steps) if line["shape"] in curves), *timed_kernels(kernels)]
    tables = [best_table(cells), *(throughput_table(shape, of_shape) for shape, of_shape in curves.items())]
    machines = dict.fromkeys(str(line["gpu"]) for line in sources if line.get("gpu"))
    title = f"Speculative decoding on {', '.join(machines) or 'an unknown machine'}"
    notes = [_INTRODUCTION, *_notes(cells, sources, bool(pictures)), *filter(None, [reason])]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(render(title, notes, pictures, [*tables, cell_table(cells)]), encoding="utf-8")
    return Written(page, folder / FIGURES if pictures else None, reason)


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


def render(title: str, notes: Iterable[str], pictures: Iterable[Picture], tables: Sequence[Table]) -> str:
    """Returns a page that needs nothing beside it; whatever the data hold is text."""
    tables = [table for table in tables if table.rows]
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes), *map(_figure, pictures)]
    meanings = {column.title: column.meaning for table in tables for column in table.columns if column.meaning}
    terms = (f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings.items())
    parts += [*map(_table, tables), "<h2>Columns explained</h2>", "<dl>", *terms, "</dl>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join(['<!DOCTYPE html><html lang="en">', f"<head>{head}</head>", "<body>", *parts, "</body></html>\n"])


def _figure(picture: Picture) -> str:
    what, caption = escape(f"{picture.title}: {picture.what}"), escape(picture.caption)
    data = base64.b64encode(picture.svg.encode()).decode()
    image = f'<img alt="{what}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(table: Table) -> str:
    sides = [' class="number"' if column.is_number else "" for column in table.columns]
    heads = (f"<th{side}>{escape(column.title)}</th>" for side, column in zip(sides, table.columns))
    rows = ["<tr>" + "".join(heads) + "</tr>"]
    for row in table.rows:
        cells = (f"<td{side}>{escape(column.text(row))}</td>" for side, column in zip(sides, table.columns))
        rows.append("<tr>" + "".join(cells) + "</tr>")
    body = "\n".join(['<div class="box"><table>', *rows, "</table></div>"])
    if len(table.rows) > MOST_OPEN:
        body = f"<details><summary>{len(table.rows)} rows</summary>\n{body}</details>"
    return f"<h2>{escape(table.title)}</h2>\n<p>{escape(table.note)}</p>\n{body}"
