"""Verified trees as one SVG: self-contained, for light and dark pages, the same bytes for the same trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .nodes import StepTree, why
from .text import Item, cut, num_columns, outline, title, wrapped

# pixels
_CHARACTER, _SMALL, _BOX, _ROW, _MARGIN, _LINE, _GAP = 7.9, 6.7, 24, 38, 16, 16, 66
_STUB = 16  # length of an edge before it turns towards its child
_MOST_LABEL, _LEAST_WIDTH = 16, 640
_LEGEND = (
    "green: accepted; dashed: the target's own token; above an edge the draft's probability of a token after its "
    "parent, below it the target's"
)
_STYLE = """
text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:13px;fill:#1f2328}
.card{fill:#ffffff;stroke:#d1d9e0}
.small{font-size:11px;fill:#59636e}
.draft,.target-prob{font-size:11px;fill:#59636e;text-anchor:middle}
.target-prob{fill:#0969da}
.token{text-anchor:middle}
.edge{fill:none;stroke:#b7bfc8;stroke-width:1.5}
.edge.accepted{stroke:#1a7f37;stroke-width:3}
.edge.target{stroke:#0969da;stroke-dasharray:4 3}
.node{fill:#f6f8fa;stroke:#b7bfc8}
.node.accepted{fill:#dafbe1;stroke:#1a7f37;stroke-width:2}
.node.cut{stroke:#1a7f37;stroke-dasharray:4 3}
.node.target{fill:#ddf4ff;stroke:#0969da;stroke-dasharray:4 3}
@media (prefers-color-scheme:dark){
text{fill:#f0f6fc}
.card{fill:#0d1117;stroke:#3d444d}
.small,.draft{fill:#9198a1}
.target-prob{fill:#58a6ff}
.edge{stroke:#59636e}
.edge.accepted{stroke:#3fb950}
.edge.target{stroke:#58a6ff}
.node{fill:#151b23;stroke:#59636e}
.node.accepted{fill:#12351f;stroke:#3fb950}
.node.cut{stroke:#3fb950}
.node.target{fill:#0c2d4f;stroke:#58a6ff}
}
"""


@dataclass
class _Box:
    """A drawn item; row: the height of its middle in rows, a whole number for leaves."""

    item: Item
    depth: int
    parent: _Box | None
    row: float = 0.0


def trees_svg(trees: Sequence[StepTree]) -> str:
    """Draws the trees one below another, with their roots on the left."""
    layouts = [_layout(outline(tree)) for tree in trees]
    edges = [_columns(boxes) for boxes in layouts]
    width = max([_LEAST_WIDTH, *(right[-1] + _MARGIN for _, right in edges)])
    body: list[str] = []
    top = float(_MARGIN)
    for tree, boxes, columns in zip(trees, layouts, edges):
        top = _write(body, title(tree), "", top, width) + _LINE / 2
        middle = [top + _BOX / 2 + _ROW * box.row for box in boxes]
        _draw(body, boxes, columns, middle)
        top = max(middle) + _BOX / 2 + _LINE / 2
        top = _write(body, why(tree), "", top, width) + _LINE
    height = _write(body, _LEGEND, "small", top - _LINE / 2, width) + _MARGIN
    size = f'width="{_px(width)}" height="{_px(height)}" viewBox="0 0 {_px(width)} {_px(height)}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{_px(width - 1)}" height="{_px(height - 1)}" rx="6"/>'
    about = _escaped(" ".join(f"{title(tree)}; {why(tree)}." for tree in trees))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{about}</title>'
    return "\n".join([head, f"<style>{_STYLE}</style>", card, *body, "</svg>", ""])


def _layout(root: Item) -> list[_Box]:
    """Gives every leaf a row of its own, and a parent the middle between its first and last child; parents first."""
    boxes = [_Box(root, 0, None)]
    pending = [boxes[0]]
    num_rows = 0
    while pending:  # depth first, first children first, so that leaves come in the order of their rows
        box = pending.pop()
        if not box.item.children:
            box.row, num_rows = num_rows, num_rows + 1
        below = [_Box(child, box.depth + 1, box) for child in box.item.children]
        boxes += below
        pending += reversed(below)
    # children come after their parents in the list
    rows: dict[int, list[float]] = {}
    for box in reversed(boxes):
        if box.item.children:
            box.row = (max(rows[id(box)]) + min(rows[id(box)])) / 2
        rows.setdefault(id(box.parent), []).append(box.row)
    return boxes


def _columns(boxes: list[_Box]) -> tuple[list[float], list[float]]:
    """Returns left and right edges of the boxes of each depth, which are as wide as the longest text there."""
    lefts, rights, left = [], [], float(_MARGIN)
    for depth in range(1 + max(box.depth for box in boxes)):
        widest = max(num_columns(_text(box)) for box in boxes if box.depth == depth)
        lefts.append(left)
        rights.append(left + max(_CHARACTER * widest + 16, 40))
        left = rights[-1] + _GAP
    return lefts, rights


def _draw(body: list[str], boxes: list[_Box], columns: tuple[list[float], list[float]], middle: list[float]) -> None:
    lefts, rights = columns
    place = {id(box): y for box, y in zip(boxes, middle)}
    # accepted edges last, so that they lie over the others
    for box, y in sorted(zip(boxes, middle), key=lambda pair: pair[0].item.kind == "accepted"):
        if box.parent is None:
            continue
        x, start, end = rights[box.depth - 1], place[id(box.parent)], lefts[box.depth]
        path = f"M{_px(x)} {_px(start)}H{_px(x + _STUB)}V{_px(y)}H{_px(end)}"
        body.append(f'<path class="edge {box.item.kind}" d="{path}"/>')
    for box, y in zip(boxes, middle):
        item, left, right = box.item, lefts[box.depth], rights[box.depth]
        size = f'x="{_px(left)}" y="{_px(y - _BOX / 2)}" width="{_px(right - left)}" height="{_BOX}"'
        body.append(f'<rect class="node {item.kind}" {size} rx="5"><title>{_escaped(_about(item))}</title></rect>')
        body.append(_line(_text(box), "token", (left + right) / 2, y + 4.5))
        beside = left - (_GAP - _STUB) / 2
        for prob, kind, below in ((item.draft_prob, "draft", -5), (item.target_prob, "target-prob", 13)):
            if prob is not None:
                body.append(_line(f"{prob:.2f}", kind, beside, y + below))


def _text(box: _Box) -> str:
    return cut(box.item.text, _MOST_LABEL)


def _about(item: Item) -> str:
    names = ("draft", item.draft_prob), ("path", item.path_prob), ("target", item.target_prob)
    return ", ".join([item.text, item.kind, *(f"{name} {prob:.4g}" for name, prob in names if prob is not None)])


def _write(body: list[str], text: str, kind: str, top: float, width: float) -> float:
    """Writes lines from `top` down, and returns where they end."""
    for line in wrapped(text, int((width - 2 * _MARGIN) / (_SMALL if kind == "small" else _CHARACTER))):
        top += _LINE
        body.append(_line(line, kind, _MARGIN, top - 4))
    return top


def _line(text: str, kind: str, x: float, y: float) -> str:
    attributes = f'class="{kind}" ' if kind else ""
    return f'<text {attributes}x="{_px(x)}" y="{_px(y)}" xml:space="preserve">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _px(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
