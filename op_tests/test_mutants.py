"""The table of planted bugs keeps up with the code: `python -m op_tests.mutants` runs it."""

from .mutants import MUTANTS
from .mutants.mutant import ROOT


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_edit_applies():
    stale = [line for mutant in MUTANTS for line in mutant.stale()]
    assert not stale, "\n".join(stale)


def test_each_is_of_one_kind():
    kinds = ["both", "kernel", "engine", "plug-in", "runtime", "tool", "example", "enumeration", "laboratory"]
    for mutant in MUTANTS:
        assert mutant.kind in kinds and (mutant.kind == "both") == bool(mutant.op), mutant.name


def test_what_must_catch_them_exists():
    texts: dict[str, str] = {}
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            texts.setdefault(file, (ROOT / file).read_text(encoding="utf-8"))
            assert f"\ndef {function.partition('[')[0]}(" in texts[file], f"{mutant.name}: {test}"


def test_a_stale_edit_is_named():
    mutant = MUTANTS[0]._replace(edits=[("pyproject.toml", "no such text", ""), ("no such file", "", "")])
    assert len(mutant.stale()) == 2 and "pyproject.toml has no 'no such text'" in mutant.stale()[0]
