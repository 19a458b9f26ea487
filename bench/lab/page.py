"""One page of tables and pictures that needs nothing beside it: no request, no script to be read, no place to be at."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..pictures import INK, LINE, PAPER
from .gallery import Picture
from .tables import Column, Table

_HERE = Path(__file__).parent


def render(title: str, about: str, tables: Sequence[Table], pictures: Sequence[Picture], notes: Sequence[str]) -> str:
    """The whole page. tables: those that have rows are shown; notes: lines above everything."""
    tables = [table for table in tables if table.rows]
    style, script = ((_HERE / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    # whatever stood in the data, only this script runs, and nothing is fetched
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = [("pictures", "Pictures")] * bool(pictures)
    links += [(f"table-{place}", table.title) for place, table in enumerate(tables)] + [("meaning", "What it means")]
    items = [f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',  # else a browser asks its server for one
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}\n</style>",
        "</head>",
        "<body>",
        "<header>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(about)}</p>',
        *(f"<p>{escape(note)}</p>" for note in notes),
        "</header>",
        f"<nav><ul>{''.join(items)}</ul></nav>",
        _filters(tables),
        "<main>",
        _gallery(pictures),
        *(_table(f"table-{place}", table) for place, table in enumerate(tables)),
        _meanings(tables),
        "</main>",
        f"<script>\n{script}\n</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _filters(tables: Iterable[Table]) -> str:
    """One for each name by which some column is filtered; hidden until the script is there to heed it."""
    names = dict.fromkeys(column.filter for table in tables for column in table.columns if column.filter)
    labels = []
    for name in names:
        known: dict[str, None] = {}
        for table in sorted(tables, key=lambda table: -len(table.rows)):  # the whole one knows the order
            for column in table.columns:
                if column.filter == name:
                    known.update(dict.fromkeys(map(column.text, table.rows)))
        if len(known) > 1:
            options = "".join(f'<option value="{escape(text)}">{escape(text)}</option>' for text in _ordered(known))
            select = f'<select name="{escape(name)}"><option value="">all</option>{options}</select>'
            labels.append(f"<label>{escape(name)}{select}</label>")
    return f'<form id="filters" hidden>{"".join(labels)}<button type="reset">show all</button></form>' if labels else ""


def _ordered(texts: Iterable[str]) -> list[str]:
    """Numbers ascending; names as they came, before them."""

    def key(text: str) -> tuple[bool, float]:
        is_number = re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text) is not None
        return is_number, float(text) if is_number else 0.0

    return sorted(texts, key=key)


def _gallery(pictures: Sequence[Picture]) -> str:
    groups: dict[str, list[str]] = {}
    for picture in pictures:
        about = "".join(f' data-of-{name}="{escape(value)}"' for name, value in picture.about.items())
        caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
        groups.setdefault(picture.what, []).append(f"<figure{about}>{_inline(picture)}{caption}</figure>")
    parts = []
    for what, shown in groups.items():
        parts += [f'<div class="group"><h3>{escape(what)}</h3>', '<div class="gallery">', *shown, "</div></div>"]
    return "\n".join(['<section id="pictures"><h2>Pictures</h2>', *parts, "</section>"]) if parts else ""


def _inline(picture: Picture) -> str:
    """The picture inside of the page: its own names, no prologue, and ink and paper those of the page."""
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", picture.svg[picture.svg.index("<svg") :], flags=re.DOTALL)
    head, body = body.split(">", 1)
    body = re.sub(r'\bid="', f'id="{picture.name}-', body)
    body = re.sub(r"url\(#", f"url(#{picture.name}-", body)
    body = re.sub(r'xlink:href="#', f'href="#{picture.name}-', body)
    # names and numbers of the data are text, in which a colour is a word like any other
    body = re.sub(r'style="[^"]*"|<style[^>]*>[^<]*</style>', lambda style: _themed(style[0]), body)
    box = re.search(r'viewBox="[^"]*"', head)[0]
    return f'<svg role="img" aria-label="{escape(f"{picture.title}: {picture.what}")}" {box}>{body.strip()}'


def _themed(style: str) -> str:
    for colour, own in ((INK, "var(--ink)"), (LINE, "var(--line)"), (PAPER, "var(--paper)")):
        style = style.replace(colour, own)
    return style


def _table(name: str, table: Table) -> str:
    head = "".join(_header(column) for column in table.columns)
    begins = [(column, '<td class="n">' if column.is_number else "<td>") for column in table.columns]
    rows = [
        "<tr>" + "".join(f"{begin}{escape(column.text(row))}</td>" for column, begin in begins) + "</tr>"
        for row in table.rows
    ]
    note = f"{escape(table.note)} " if table.note else ""
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    return "\n".join(
        [
            f'<section id="{name}"><h2>{escape(table.title)}</h2>',
            f'<p class="soft">{note}<span id="{name}-table-count">{count}</span></p>',
            # what scrolls must be reachable without a mouse
            f'<div class="box" tabindex="0" role="region" aria-label="{escape(table.title)}">',
            f'<table id="{name}-table"><thead><tr>{head}</tr></thead>',
            "<tbody>",
            *rows,
            "</tbody></table></div></section>",
        ]
    )


def _header(column: Column) -> str:
    kind = ' class="n"' if column.is_number else ""
    filtered = f' data-filter="{escape(column.filter)}"' if column.filter else ""
    meaning = f' title="{escape(column.meaning)}"' if column.meaning else ""
    return f'<th scope="col"{kind}{filtered}{meaning}>{escape(column.title)}</th>'


def _meanings(tables: Iterable[Table]) -> str:
    """Of every column that has one, each once."""
    meanings = {(column.title, column.meaning): None for table in tables for column in table.columns if column.meaning}
    items = "\n".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in meanings)
    return f'<section id="meaning"><h2>What it means</h2>\n<dl>\n{items}\n</dl></section>' if items else ""
