"""The table of planted bugs keeps up with the code: `python -m op_tests.mutants` runs it."""

import pytest

from .mutants import MUTANTS
from .mutants.mutant import ROOT

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def test_names_are_unique():
    assert len(BY_NAME) == len(MUTANTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_edit_applies(name):
    assert not BY_NAME[name].stale()


@pytest.mark.parametrize("name", BY_NAME)
def test_it_is_of_one_kind(name):
    kinds = "both kernel engine plug-in runtime tool example enumeration laboratory"
    assert BY_NAME[name].kind in kinds.split()
    assert (BY_NAME[name].kind == "both") == bool(BY_NAME[name].op)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_must_catch_it_exists(name):
    assert BY_NAME[name].tests
    for test in BY_NAME[name].tests:
        file, _, function = test.partition("::")
        assert f"\ndef {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_stale_edit_is_named():
    mutant = MUTANTS[0]._replace(edits=[("pyproject.toml", "no such text", ""), ("no such file", "", "")])
    assert len(mutant.stale()) == 2 and "pyproject.toml has no 'no such text'" in mutant.stale()[0]
