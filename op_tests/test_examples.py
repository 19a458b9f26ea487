"""Every example runs as a program, and its text is that of plain decoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "eagle_kernels" / "examples").glob("*.py") if path.stem != "__init__")


def run(name: str) -> str:
    # on a machine that other tests keep busy, threads of one product wait for each other
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"eagle_kernels.examples.{name}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    if name == "own_server":
        pytest.importorskip("transformers")
    told = run(name)
    assert "tokens a step" in told and "the text of plain decoding" in told
    assert "ANOTHER TEXT" not in told


def test_an_example_for_each_kind_of_user():
    assert EXAMPLES == ["own_drafter", "own_server", "paged_server", "seeds"]
