"""Tables of results as Markdown, of the newest lines, and the pages that hold them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def markdown(table: list[list[str]]) -> str:
    """Returns the table as Markdown; its first row is the header."""
    header, *rows = table
    # names to the left, numbers to the right
    rule = [":--" if rows and any(c.isalpha() for c in rows[0][i]) else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def newest(lines: Sequence[dict]) -> dict[tuple[str, str, str], dict]:
    """Returns the last line of each section, case and provider."""
    return {(line["section"], line["case"], line["provider"]): line for line in lines}


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Returns a page's text with each part between its marks, `<!-- name:begin -->` and `<!-- name:end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, begin, rest = text.partition(f"<!-- {name}:begin -->")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if not end:
            raise ValueError(f"{page.name} must hold the marks {name}:begin and, after it, {name}:end")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def fill_page(
    module: str, page: Path, arguments: Sequence[str] | None, parts: Callable, measure: Callable | None = None
) -> int:
    """Runs the command line of a page whose numbers are computed; returns the exit status: 1 from `--check` if one is
    another. parts: returns what stands between its marks, by name. measure: what `--measure` does before."""
    about = f"Writes the numbers of {page.name}."
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    parser.add_argument("--page", type=Path, default=page)
    if measure is not None:
        parser.add_argument("--measure", action="store_const", const=measure, help="measure anew, on the CPU")
    options = parser.parse_args(arguments)
    if getattr(options, "measure", None):
        measure()
    return write_stale({options.page: filled(options.page, parts())}, module, options.check)


def write_stale(pages: Mapping[Path, str], command: str, is_checked: bool) -> int:
    """Writes the pages whose text is another one; with is_checked only names them, and returns 1 if there are any."""
    stale = {page: text for page, text in pages.items() if not page.exists() or page.read_text("utf-8") != text}
    for page, text in stale.items():
        print(f"{page} is not up to date: run python -m {command}" if is_checked else f"wrote {page}")
        if not is_checked:
            page.write_text(text, encoding="utf-8")
    return int(bool(stale) and is_checked)
