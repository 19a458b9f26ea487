"""The mirror law: an op is four files with one name, and launcher and reference have one signature."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import eagle_kernels
from op_tests.harness.cases import module_of_op

ROOT = Path(__file__).parent.parent
# a reference takes `out` only where part of what the caller's buffers hold may stay
LAUNCHER_ONLY = {"out", "workspace", "deterministic", "plan", "prefetch_weight"}
# what exact enumeration puts in place of a reference's random draws
REFERENCE_ONLY = {"draw"}
ONE_SIDED = LAUNCHER_ONLY | REFERENCE_ONLY


# the four files of an op: a folder each, and what their names begin with
FOLDERS = {"eagle_kernels/ops": "", "reference/ops": "", "op_tests/ops": "test_", "bench/ops": "bench_"}


def op_paths(root: Path, folder: str) -> set[str]:
    """`category.name` of every op file of a folder; other files must not hide among them."""
    prefix = FOLDERS[folder]
    return {
        f"{path.parent.name}.{path.stem.removeprefix(prefix)}"
        for path in (root / folder).glob("*/*.py")
        if path.stem != "__init__" and path.stem.startswith(prefix)
    }


def missing_files(root: Path) -> list[str]:
    """The files that ops lack, of which one of the other three is there."""
    ops = sorted(set.union(*(op_paths(root, folder) for folder in FOLDERS)))
    files = [f"{folder}/{op.replace('.', '/' + prefix)}.py" for op in ops for folder, prefix in FOLDERS.items()]
    return [file for file in files if not (root / file).is_file()]


OPS = sorted(op_paths(ROOT, "eagle_kernels/ops"))


def test_every_op_is_four_files():
    missing = missing_files(ROOT)
    assert not missing, "an op is four files, of which these are missing: " + ", ".join(missing)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_missing_file_is_named(folder, tmp_path):
    """Whichever of the four it is, and nothing else."""
    for other, prefix in FOLDERS.items():
        for name in ("old", "new"):
            file = tmp_path / other / "tree" / f"{prefix}{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    assert missing_files(tmp_path) == []
    (tmp_path / folder / "tree" / f"{FOLDERS[folder]}new.py").unlink()
    assert missing_files(tmp_path) == [f"{folder}/tree/{FOLDERS[folder]}new.py"]


def test_every_op_is_registered():
    differing = set(eagle_kernels.ops.OPS.values()) ^ set(OPS)
    assert not differing, "in eagle_kernels/ops/registry.py or as a file, not both: " + ", ".join(sorted(differing))


@pytest.mark.parametrize("path", OPS)
def test_launcher_and_reference_have_one_signature(path):
    """The launcher is the raw function, beside a public one."""
    name = path.rpartition(".")[2]
    launcher = getattr(module_of_op(path), name)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    ours, theirs = (
        [(p.name, p.kind) for p in inspect.signature(function).parameters.values() if p.name not in ONE_SIDED]
        for function in (launcher, reference)
    )
    assert ours == theirs
    assert name in eagle_kernels.__all__ and callable(getattr(eagle_kernels, name))
    assert name in eagle_kernels.raw.__all__ and getattr(eagle_kernels.raw, name) is launcher


@pytest.mark.parametrize("path", OPS)
def test_a_file_tells_what_a_reader_needs(path):
    """The parts of its docstring, and a default in each tuning table, its own or of what it shares."""
    module = module_of_op(path)
    for section in ("Computes", "Invariants", "Grid", "Launches", "Traffic"):
        assert re.search(rf"^{section}(:|$)", module.__doc__, re.MULTILINE), f"{path} has no section {section}"
    names = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    shared = [sys.modules[name] for name in names if ".shared." in name]
    tables = [value for each in (module, *shared) for name, value in vars(each).items() if name.endswith("TUNING")]
    assert tables and all("default" in table for table in tables)


def test_a_tuning_table_says_what_it_is_for():
    """In a comment above it, or above the tables and the rows that stand between."""
    for path in (ROOT / "eagle_kernels" / "ops").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if re.match(r"[A-Z_]*TUNING = ", line):
                between = (above for above in reversed(lines[:number]) if not re.match(r"_?[A-Z_]+ = | +[\"}]", above))
                assert next(between).startswith("#"), f"{path}: {line}"
