"""Runs a notebook without Jupyter: `python -m op_tests.harness.notebook FILE` writes the cells' outputs into it.

A cell's output is what it prints and, as in Jupyter, the value of its last expression: as SVG or PNG where it is a
picture, else as text. Other features of Jupyter (magics, several languages, widgets) are refused.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


class CellError(Exception):
    """A cell that raised, or that is more than Python."""


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns the outputs of each code cell, in the form of nbformat 4; all cells share one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook), 1):
        source = "".join(cell["source"])
        try:
            outputs.append(_run_cell(source, namespace, number))
        except Exception as error:
            raise CellError(f"cell {number}: {type(error).__name__}: {error}\n{source}") from error
    return outputs


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run_cell(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    body = ast.parse(source).body  # a magic is no Python, and raises here
    last = body.pop().value if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, type_ignores=[]), f"cell {number}", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last), f"cell {number}", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _shown(value)}
        )
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """Returns a value by MIME type, the way it would be shown."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_svg_"):
        data["image/svg+xml"] = _lines(value._repr_svg_())
    elif hasattr(value, "savefig"):  # a figure of matplotlib, which Jupyter knows
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode() + "\n"
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: list[str]) -> int:
    """Runs the notebook and writes the outputs into it."""
    path = Path(arguments[0])
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook)), 1):
        cell["outputs"], cell["execution_count"] = outputs, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
