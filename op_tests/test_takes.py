"""What each op takes stands in takes.txt: dtypes, sizes, strides and numbers one step away from sound calls.

A rule that is dropped, or that is too strict, changes a line there. Where that is meant, `python -m
op_tests.harness.taken` writes the table anew.
"""

from __future__ import annotations

import pytest

from op_tests.harness.ahead_of_time import PATHS
from op_tests.harness.taken import TABLE, taken

LINES = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", PATHS)
def test_ops_take_what_the_table_says(path):
    assert taken(path) == [line for line in LINES if line.startswith(path + " ")]


def test_the_table_is_of_these_ops():
    assert {line.split()[0] for line in LINES} == set(PATHS)
