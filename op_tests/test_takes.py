"""What each op takes stands in takes.txt: dtypes, sizes, strides and numbers one step away from sound calls.

What is refused is named in one line that says what was got. A rule that is dropped, or that is too strict, changes a
line of the table. Where that is meant, `python -m op_tests.harness.taken` writes the table anew.
"""

import pytest

import eagle_kernels

from .harness import to_device
from .harness.ahead_of_time import PATHS, module_of_tests
from .harness.taken import TABLE, taken

LINES = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", PATHS)
def test_ops_take_what_the_table_says(path):
    assert taken(path) == [line for line in LINES if line.startswith(path + " ")]


def test_the_table_is_of_these_ops():
    assert {line.split()[0] for line in LINES} == set(PATHS)


@pytest.mark.parametrize("path", [path for path in PATHS if hasattr(module_of_tests(path), "wrong_calls")])
def test_rules_of_several_arguments_are_named(path, device):
    """Those that an op's test module lists."""
    name = path.rpartition(".")[2]
    for values, message in module_of_tests(path).wrong_calls():
        with pytest.raises((ValueError, TypeError), match=rf"^eagle_kernels\.{name}: .*{message}"):
            getattr(eagle_kernels.raw, name)(**to_device(values, device))
