"""The mirror law: an op is four files with one name, and launcher and reference have one signature."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import eagle_kernels

ROOT = Path(__file__).parent.parent
# a reference takes `out` only where part of what the caller's buffers hold may stay
LAUNCHER_ONLY = {"out", "workspace", "deterministic", "plan", "prefetch_weight"}
# what exact enumeration puts in place of a reference's random draws
REFERENCE_ONLY = {"draw"}
ONE_SIDED = LAUNCHER_ONLY | REFERENCE_ONLY


def op_paths(folder: Path, prefix: str = "") -> set[str]:
    """`category.name` of every op file of a folder; other files must not hide among them."""
    return {
        f"{path.parent.name}.{path.stem.removeprefix(prefix)}"
        for path in folder.glob("*/*.py")
        if path.stem != "__init__" and path.stem.startswith(prefix)
    }


OPS = sorted(op_paths(ROOT / "eagle_kernels" / "ops"))


@pytest.mark.parametrize(
    ("folder", "prefix"), [("reference/ops", ""), ("op_tests/ops", "test_"), ("bench/ops", "bench_")]
)
def test_every_op_is_four_files(folder, prefix):
    assert sorted(op_paths(ROOT / folder, prefix)) == OPS


def test_every_op_is_registered():
    assert sorted(eagle_kernels.ops.OPS.values()) == OPS


@pytest.mark.parametrize("path", OPS)
def test_launcher_and_reference_have_one_signature(path):
    name = path.rpartition(".")[2]
    launcher = getattr(importlib.import_module("eagle_kernels.ops." + path), name)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    ours, theirs = (
        [(p.name, p.kind) for p in inspect.signature(function).parameters.values() if p.name not in ONE_SIDED]
        for function in (launcher, reference)
    )
    assert ours == theirs


@pytest.mark.parametrize("path", OPS)
def test_every_op_is_public_and_raw(path):
    name = path.rpartition(".")[2]
    assert name in eagle_kernels.__all__ and callable(getattr(eagle_kernels, name))
    assert name in eagle_kernels.raw.__all__
    assert getattr(eagle_kernels.raw, name) is getattr(importlib.import_module("eagle_kernels.ops." + path), name)


@pytest.mark.parametrize("path", OPS)
def test_the_docstring_tells_what_a_reader_needs(path):
    module = importlib.import_module("eagle_kernels.ops." + path)
    for section in ("Computes", "Invariants", "Grid", "Launches", "Traffic"):
        assert f"\n{section}\n" in module.__doc__, f"{path} has no section {section}"


@pytest.mark.parametrize("path", OPS)
def test_a_tuning_table_has_a_default(path):
    """Its own, or of what it shares."""
    module = importlib.import_module("eagle_kernels.ops." + path)
    shared = [value for value in vars(module).values() if ".shared." in getattr(value, "__name__", "")]
    tables = [value for each in (module, *shared) for name, value in vars(each).items() if name.endswith("TUNING")]
    assert tables and all("default" in table for table in tables)
