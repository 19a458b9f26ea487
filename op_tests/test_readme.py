"""The README: its examples run, its links lead somewhere, and it stays short."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@functools.cache
def run(example: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(example):
    result = run(example)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_ops_example_prints_what_its_comments_say():
    result = run(EXAMPLES[0])
    assert "[ 1,  3,  5, 11, 21]" in result.stdout
    assert "[[ 0,  1,  3, -1]]" in result.stdout and "[2]" in result.stdout


def test_ci_runs_the_two_commands_as_they_stand_here():
    assert "generate" in COMMANDS[0] and "pytest" in COMMANDS[1]
    reader = next(line for line in CI.splitlines() if line.startswith("mapfile"))
    script = reader + "\nprintf '%s\\n' \"${commands[@]}\""
    read = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == COMMANDS[:2]
    before, loop, _ = CI.partition('for command in "${commands[@]}"; do\n')
    assert loop and 'eval "$command"' in CI
    assert re.findall(r"pip install -q (\S+)", before) == ["torch==2.13.0"], "versions that the README does not name"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), f"README.md links to {target}"


def test_every_op_is_listed():
    for path in (ROOT / "eagle_kernels" / "ops").glob("*/*.py"):
        assert path.stem == "__init__" or f"`{path.stem}`" in README


def test_it_is_short():
    """Its tables have a row for every op; all else is counted."""
    assert len([line for line in README.splitlines() if not line.startswith("|")]) <= 140
