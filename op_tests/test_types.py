"""Type checkers accept what users write: the README's examples, `eagle_kernels/examples`, and a call of every op."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eagle_kernels

ROOT = Path(__file__).parent.parent
CALLS = ROOT / "op_tests" / "calls_of_all_ops.py"
README_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)

WRONG = """\
import torch

import eagle_kernels as ek

tree = ek.build_tree(1, 2, 3, 4, 5, topk="2", spec_steps=3, num_verify_tokens=5)
print(tree.no_such_field)
ek.rms_norm(torch.ones(1, 4))
"""


def check(checker: str, *files: Path) -> subprocess.CompletedProcess:
    if not importlib.util.find_spec(checker):
        pytest.skip(f"needs {checker}")
    # pyright is no Python program, and looks for packages where it is told to
    options = ["--pythonpath", sys.executable] if checker == "pyright" else []
    command = [sys.executable, "-m", checker, *options, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_checkers_accept_what_is_right_and_see_what_is_wrong(checker, tmp_path):
    """One run, since reading torch takes most of it: no error but in a file of wrong calls, and all of its own.

    Wrong are five arguments that are no tensors, a text for a number, a field that is not there, a missing weight.
    """
    pytest.importorskip("transformers")  # whose types an example uses
    files = []
    for index, example in enumerate(README_EXAMPLES):
        files.append(tmp_path / f"readme_{index}.py")
        files[-1].write_text(example, encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG, encoding="utf-8")
    result = check(checker, CALLS, ROOT / "eagle_kernels" / "examples", *files, wrong)
    errors = [line for line in result.stdout.splitlines() if re.search(r"\berror: ", line)]
    others = [line for line in errors if "wrong.py" not in line]
    assert not others, "\n".join(others)
    assert result.returncode == 1 and len(errors) >= 8, result.stdout + result.stderr


def test_every_op_is_called_and_every_field_is_read():
    tree = ast.parse(CALLS.read_text(encoding="utf-8"))
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "ek"}  # fmt: skip
    assert called == {*eagle_kernels.ops.OPS, "verify_tree"}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        name = function.name.removesuffix("_")
        if name in eagle_kernels.ops.OPS:
            module = importlib.import_module("eagle_kernels.ops." + eagle_kernels.ops.OPS[name])
            read = {node.attr for node in ast.walk(function) if ast.unparse(node).startswith("result.")
                    and isinstance(node, ast.Attribute)}  # fmt: skip
            assert read == set(getattr(getattr(module, "Output", None), "_fields", ())), name
