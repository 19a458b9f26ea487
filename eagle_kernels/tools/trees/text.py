"""A verified tree in a terminal: box-drawing lines, one for each node, with the probabilities in columns beside it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from .nodes import StepTree, label, why

_GREEN, _DIM, _PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
_COLORS = {"accepted": _GREEN, "target": _GREEN, "rejected": _DIM}
_MARKS = {"accepted": "●", "cut": "◐", "rejected": "○", "target": "▸"}
# replacements for marks and lines that cannot be printed
_ASCII = str.maketrans("●◐○▸└├│─…", "*+o>`||-.")
_COLUMNS = ("draft", "path", "target")
_NUMBER = 8
_LEAST_WIDTH = 2 * len(_COLUMNS) * _NUMBER
_MOST_LABEL = 24


class Item(NamedTuple):
    """What is drawn for a node, or for the target's token after the path."""

    # "accepted": and in the text; "cut": accepted after the end of the text; "rejected"; "target": its own token
    kind: str
    text: str
    draft_prob: float | None
    path_prob: float | None
    target_prob: float | None
    children: list[Item]


def outline(tree: StepTree) -> Item:
    """Returns the root, with everything below it."""
    items: dict[int, Item] = {}
    for node in tree.nodes:
        kind = "accepted" if node.is_in_text else "cut" if node.is_accepted else "rejected"
        probs = node.draft_prob, node.path_prob, node.target_prob
        item = items[node.number] = Item(kind, label(node.token_id, node.text), *probs, [])
        if node.parent >= 0:
            items[node.parent].children.append(item)
    choice = tree.stop.choice
    if choice is not None:
        item = Item("target", label(choice.token_id, choice.text), None, None, choice.prob, [])
        items[tree.stop.node].children.append(item)
    return items[0]


def title(tree: StepTree) -> str:
    """Returns the result of the step in one line."""
    drafts, tokens = len(tree.nodes) - 1, len(tree.tokens)
    after = f" after {tree.context!r}" if tree.context else ""
    accepted = f"{tree.num_accepted} of {drafts} draft{'' if drafts == 1 else 's'} accepted"
    brought = f"{tokens} token{'' if tokens == 1 else 's'}"
    end = "" if tree.finish_reason is None else f", the end of the text ({tree.finish_reason})"
    return f"step {tree.step}{after}: {accepted}, {brought}{end}"


def can_draw(encoding: str | None) -> bool:
    """Returns whether a terminal of this encoding, or of none, shows marks and lines."""
    try:
        "".join(map(chr, _ASCII)).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def tree_text(tree: StepTree, width: int = 100, use_color: bool = False, is_ascii: bool = False) -> str:
    """Draws title, tree, and why the path stopped, in lines of at most `width` columns (at least 48).

    is_ascii  writes only ASCII: other characters of the text become Python's escapes

    Columns: the draft's probability of a node after its parent, the product of these down to it, and the target's
    probability of it after its parent if the parent is on the accepted path.
    """
    width = max(width, _LEAST_WIDTH)
    told = _escaped if is_ascii else str
    rows = [(prefix, f"{_MARKS[item.kind]} {told(item.text)}", item) for prefix, item in _rows(outline(tree))]
    room = min(width - len(_COLUMNS) * _NUMBER, max(num_columns(prefix + shown) for prefix, shown, _ in rows))
    lines = [" " * room + "".join(f"{name:>{_NUMBER}}" for name in _COLUMNS)]
    for prefix, shown, item in rows:
        shown = cut(shown, max(room - len(prefix), min(room, _MOST_LABEL)))
        prefix = _cut_left(prefix, room - num_columns(shown))
        numbers = (item.draft_prob, item.path_prob, item.target_prob)
        beside = "".join(f"{'' if number is None else format(number, '.2f'):>{_NUMBER}}" for number in numbers)
        line = (shown + " " * (room - len(prefix) - num_columns(shown)) + beside).rstrip()
        color = _COLORS.get(item.kind) if use_color else None
        lines.append(prefix + (f"{color}{line}{_PLAIN}" if color else line))
    text = "\n".join([*wrapped(told(title(tree)), width), *lines, *wrapped(told(why(tree)), width)])
    return text.translate(_ASCII) if is_ascii else text


def _escaped(text: str) -> str:
    return text.encode("ascii", errors="backslashreplace").decode("ascii")


def _rows(root: Item) -> Iterator[tuple[str, Item]]:
    """Yields items depth first, each with the lines that lead to it."""
    pending = [("", "", root)]
    while pending:
        prefix, below, item = pending.pop()
        yield prefix, item
        for place, child in reversed(list(enumerate(item.children, start=1))):
            is_last = place == len(item.children)
            pending.append((below + ("└─" if is_last else "├─"), below + ("  " if is_last else "│ "), child))


def num_columns(text: str) -> int:
    """Returns the columns that a text takes in a fixed-width font, in which some characters are twice as wide."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def cut(text: str, room: int) -> str:
    """Returns the text, without its end if it takes more than `room` columns."""
    if num_columns(text) <= room:
        return text
    while num_columns(text) > room - 1:
        text = text[:-1]
    return text + "…"


def _cut_left(prefix: str, room: int) -> str:
    """Returns the last of the lines that lead to a deep node."""
    return prefix if len(prefix) <= room else ("…" + prefix)[: room > 0] + prefix[len(prefix) - max(room - 1, 0) :]


def wrapped(text: str, width: int) -> list[str]:
    """Breaks a text at spaces, and words that are too wide. Counts columns, where `textwrap` counts characters."""
    lines = [""]
    for part in re.findall(" +|[^ ]+", text):
        if num_columns(lines[-1] + part) > width >= num_columns(part):
            lines.append("")
        for character in part:
            if num_columns(lines[-1] + character) > width:
                lines.append("")
            if lines[-1] or character != " ":
                lines[-1] += character
    return [line.rstrip() for line in lines]
