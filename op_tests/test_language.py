"""Versions of triton: what cannot run is told in one line, and the references stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE = """
import torch, eagle_kernels as ek
values = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1]), torch.tensor([1]), torch.zeros(1)
print(ek.sample_from_logits(*values).tolist())
try:
    ek.raw.sample_from_logits(*values)
except RuntimeError as error:
    print(error)
"""
NEEDS = "eagle_kernels.sample_from_logits: the triton backend needs "
NO_TRITON = {
    "old": ("__version__ = '3.2.0'", "triton 3.4 or newer; 3.2.0 is installed"),
    "broken": (
        "raise ImportError('libtriton.so: undefined symbol')",
        "the package triton, which is installed but broken: libtriton.so: undefined symbol",
    ),
    "half_installed": (
        "import triton.runtime",
        "the package triton, which is installed but broken: No module named 'triton.runtime'",
    ),
    "raising": (
        "raise RuntimeError('no driver\\nsecond line')",
        "the package triton, which is installed but broken: no driver",
    ),
}


def run(code: str, *, path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean |= {"PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("case", NO_TRITON)
def test_an_unusable_triton_is_one_line(case, tmp_path):
    """At the import as a warning, at a launch as an error; the references run."""
    source, missing = NO_TRITON[case]
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text(source + "\n")
    if case == "old":
        (package / "language.py").touch()
    result = run(USE, path=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[1]", NEEDS + missing]
    assert [line for line in result.stderr.splitlines() if "Warning" in line][0].endswith(
        f"UserWarning: eagle_kernels: kernels cannot run, they need {missing}"
    )


def test_an_absent_triton_is_no_warning():
    result = run("import sys; sys.modules['triton'] = None\n" + USE)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.splitlines() == ["[1]", NEEDS + "the package triton, which is not installed"]


def test_the_interpreter_is_asked_for_before_the_import():
    pytest.importorskip("triton")
    late = "import os, eagle_kernels; os.environ['TRITON_INTERPRET'] = '1'\n"
    assert run(late + USE).stdout.splitlines() == [
        "[1]",
        "eagle_kernels.sample_from_logits: TRITON_INTERPRET=1 was set after eagle_kernels was imported, which left its "
        "kernels to a GPU; set it before the first import",
    ]
    assert run(USE, TRITON_INTERPRET="1").stdout.splitlines() == ["[1]"]
