"""Tables of results as Markdown, of the newest lines."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(table: list[list[str]]) -> str:
    """Returns the table as Markdown; its first row is the header."""
    header, *rows = table
    # names to the left, numbers to the right
    rule = [":--" if rows and any(c.isalpha() for c in rows[0][i]) else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def newest(lines: Sequence[dict]) -> dict[tuple[str, str, str], dict]:
    """Returns the last line of each section, case and provider."""
    return {(line["section"], line["case"], line["provider"]): line for line in lines}
