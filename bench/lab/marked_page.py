"""Pages whose numbers are computed: what stands between two marks is written by a command, and checked by a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def update(page: Path, parts: Mapping[str, str], command: str, *, is_checked: bool) -> int:
    """Writes the parts between their marks in the page; with is_checked only returns 1 if they differ."""
    old = new = page.read_text(encoding="utf-8")
    for mark, content in parts.items():
        before, begin, rest = new.partition(f"<!-- {mark}:begin -->")
        _, end, after = rest.partition(f"<!-- {mark}:end -->")
        if not end:
            raise ValueError(f"{page.name} must hold the marks {mark}:begin and, after it, {mark}:end")
        new = f"{before}{begin}\n{content}\n{end}{after}"
    if new != old:
        print(f"{page} is not up to date: run {command}" if is_checked else "written")
        if not is_checked:
            page.write_text(new, encoding="utf-8")
    return int(new != old and is_checked)
