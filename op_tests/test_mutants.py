"""The table of planted bugs keeps up with the code: `python -m op_tests.mutants` runs it."""

from __future__ import annotations

import pytest

from .mutants import ENGINE, MUTANTS, ROOT, SGLANG, stale

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def test_names_are_unique():
    assert len(BY_NAME) == len(MUTANTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_edit_applies(name):
    assert not stale(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_edits_lie_where_the_kind_says(name):
    files = {file for file, _, _ in BY_NAME[name].edits}
    in_kernel = {file for file in files if file.startswith("eagle_kernels/ops/")}
    in_engine = {file for file in files if file.startswith((ENGINE, SGLANG))}
    in_tests = {file for file in files if file.startswith(("op_tests/", "reference/enumeration.py"))}
    in_reference = {file for file in files if file.startswith("reference/")} - in_tests
    places = {"kernel": in_kernel, "reference": in_reference, "engine": in_engine, "enumeration": in_tests}
    assert files == set().union(*places.values())
    kind = BY_NAME[name].kind
    wanted = {"kernel", "reference"} if kind == "both" else {kind}
    assert {place for place, found in places.items() if found} == wanted


@pytest.mark.parametrize("name", BY_NAME)
def test_what_must_catch_it_exists(name):
    assert BY_NAME[name].tests
    for test in BY_NAME[name].tests:
        file, _, function = test.partition("::")
        assert f"\ndef {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_stale_edit_is_named():
    mutant = MUTANTS[0]._replace(edits=[("pyproject.toml", "no such text", ""), ("no such file", "", "")])
    assert len(stale(mutant)) == 2 and "pyproject.toml has no 'no such text'" in stale(mutant)[0]
