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
# a longer table is closed until somebody opens it, and can be searched
_MOST_OPEN = 30


def render(title: str, about: str, tables: Sequence[Table], pictures: Sequence[Picture], notes: Sequence[str]) -> str:
    """The whole page. tables: those that have rows are shown; notes: lines above everything."""
    tables = [table for table in tables if table.rows]
    style, script = ((_HERE / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    # whatever stood in the data, only this script runs, and nothing is fetched
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = [("pictures", "Pictures")] * bool(pictures)
    links += [(f"table-{place}", table.title) for place, table in enumerate(tables)]
    links += [("meaning", "Columns explained")]
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
        '<a class="skip" href="#content">Skip to the results</a>',
        "<header>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(about)}</p>',
        *(f"<p>{escape(note)}</p>" for note in notes),
        "</header>",
        f'<nav aria-label="Parts of this page"><ul>{"".join(items)}</ul></nav>',
        _filters(tables),
        '<main id="content" tabindex="-1">',
        _gallery(pictures),
        '<div class="tables">',
        *(_table(f"table-{place}", table) for place, table in enumerate(tables)),
        "</div>",
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
    if not labels:
        return ""
    button = '<button type="reset">Show all</button>'
    return f'<form id="filters" aria-label="Filter pictures and tables" hidden>{"".join(labels)}{button}</form>'


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
    if not groups:
        return ""
    large = {what: shown for what, shown in groups.items() if len(shown) > 1}
    parts = ['<section id="pictures"><h2>Pictures</h2>']
    if len(large) > 1:
        others = [figure for what, shown in groups.items() if what not in large for figure in shown]
        for what, shown in (large | ({"More": others} if others else {})).items():
            parts += [f'<div class="group"><h3>{escape(what)}</h3>', _columns(shown), "</div>"]
    else:  # a heading over every picture would leave most of its row blank; each says what it is of
        parts.append(_columns([figure for shown in groups.values() for figure in shown]))
    return "\n".join([*parts, "</section>"])


def _columns(figures: Sequence[str]) -> str:
    """As many beside each other as there is room for, and no more than there are."""
    return "\n".join([f'<div class="gallery" style="--most: {len(figures)}">', *figures, "</div>"])


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
    words = f"{picture.title}: {picture.what}. {picture.words}".strip()
    return f'<svg role="img" aria-label="{escape(words)}" {box}>{body.strip()}'


def _themed(style: str) -> str:
    for colour, own in ((INK, "var(--ink)"), (LINE, "var(--line)"), (PAPER, "var(--paper)")):
        style = style.replace(colour, own)
    return style


def _table(name: str, table: Table) -> str:
    first, *others = table.columns
    keys = [column for column in others if column.is_key]
    begins = [(column, f"<td{_class(column, column.is_key)}>") for column in others]
    rows = []
    for row in table.rows:
        # a phone has no room for the columns that tell which row it is: there they stand below the first cell
        told = [(column.title if column.is_number else "", column.text(row)) for column in keys]
        more = ", ".join(f"{title}\N{NO-BREAK SPACE}{text}" if title else text for title, text in told if text != "-")
        below = f' data-more="{escape(more)}"' if more else ""
        named = escape(first.text(row)).replace("_", "_<wbr>")
        head = f'<th scope="row"{_class(first)}{below}>{named}</th>'
        cells = "".join(f"{begin}{escape(column.text(row))}</td>" for column, begin in begins)
        rows.append(f"<tr>{head}{cells}</tr>")
    heads = _header(first, False) + "".join(_header(column, column.is_key) for column in others)
    is_long = len(rows) > _MOST_OPEN
    count = f'<span id="{name}-table-count" role="status">{"1 row" if len(rows) == 1 else f"{len(rows)} rows"}</span>'
    label, kind = escape(table.title), ' class="long"' * is_long
    about = escape(table.note) + f" {count}." * (not is_long)
    search = f'<input type="search" data-for="{name}-table" autocomplete="off" spellcheck="false">'
    opened = [
        f"<details><summary>Table with {count}</summary>",
        f'<p class="search" hidden><label>Find rows that contain {search}</label></p>',
    ]
    return "\n".join(
        [
            f'<section id="{name}"{kind}><h2>{label}</h2>',
            f'<p class="soft">{about}</p>',
            *(opened if is_long else ()),
            # what scrolls must be reachable without a mouse
            f'<div class="box" tabindex="0" role="region" aria-label="{label}">',
            f'<table id="{name}-table"><thead><tr>{heads}</tr></thead>',
            "<tbody>",
            *rows,
            "</tbody></table></div>" + "</details>" * is_long + "</section>",
        ]
    )


def _class(column: Column, is_below: bool = False) -> str:
    """n: a number; k: on a phone it stands below the first cell."""
    names = " ".join(["n"] * column.is_number + ["k"] * is_below)
    return f' class="{names}"' if names else ""


def _header(column: Column, is_below: bool) -> str:
    filtered = f' data-filter="{escape(column.filter)}"' if column.filter else ""
    meaning = f' title="{escape(column.meaning)}"' if column.meaning else ""
    title = column.title.replace("-", "\N{NON-BREAKING HYPHEN}")
    return f'<th scope="col"{_class(column, is_below)}{filtered}{meaning}>{escape(title)}</th>'


def _meanings(tables: Iterable[Table]) -> str:
    """Of every column that has one, each once."""
    meanings = {(column.title, column.meaning): None for table in tables for column in table.columns if column.meaning}
    items = "\n".join(f"<div><dt>{escape(title)}</dt><dd>{escape(text)}</dd></div>" for title, text in meanings)
    return f'<section id="meaning"><h2>Columns explained</h2>\n<dl>\n{items}\n</dl></section>' if items else ""
