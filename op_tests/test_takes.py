"""What each op takes stands in takes.txt: dtypes, sizes, strides and numbers one step away from sound calls.

What is refused is named in one line that says what was got. A rule that is dropped, or that is too strict, changes a
line of the table. Where that is meant, `python -m op_tests.harness.taken` writes the table anew.
"""

from __future__ import annotations

import pytest
import torch

import eagle_kernels

from .harness import to_device
from .harness.ahead_of_time import PATHS, module_of_tests
from .harness.cases import cases_of, signature_of
from .harness.taken import TABLE, taken

LINES = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", PATHS)
def test_ops_take_what_the_table_says(path):
    assert taken(path) == [line for line in LINES if line.startswith(path + " ")]


def test_the_table_is_of_these_ops():
    assert {line.split()[0] for line in LINES} == set(PATHS)


# by annotation, without the None that an argument may be: what is none, and what is said of it
OTHER_KINDS = {
    "torch.Tensor": [(1, "must be a tensor, got int"), ([1], "must be a tensor, got list")],
    "int": [(2.0, "must be an int, got float"), ("2", "must be an int, got str")],
    "float": [("2", "must be a number, got str"), (torch.ones(()), "must be a number, got Tensor")],
    "str": [("any", "must be one of "), (None, "must be one of ")],
}


@pytest.mark.parametrize("path", PATHS)
def test_arguments_of_another_kind_are_named(path):
    name = path.rpartition(".")[2]
    values = next(iter(cases_of(path)))
    for field, parameter in signature_of(path).items():
        kind = str(parameter.annotation).removesuffix(" | None")
        wrong = OTHER_KINDS.get(kind, [])
        if parameter.default is parameter.empty and kind == str(parameter.annotation) == "int":
            wrong = [*wrong, (None, "must be an int, got NoneType")]
        for value, message in wrong:
            with pytest.raises((ValueError, TypeError), match=rf"^eagle_kernels\.{name}: {field} {message}"):
                getattr(eagle_kernels.raw, name)(**values | {field: value})


@pytest.mark.parametrize("path", [path for path in PATHS if hasattr(module_of_tests(path), "wrong_calls")])
def test_rules_of_several_arguments_are_named(path, device):
    """Those that an op's test module lists."""
    name = path.rpartition(".")[2]
    for values, message in module_of_tests(path).wrong_calls():
        with pytest.raises((ValueError, TypeError), match=rf"^eagle_kernels\.{name}: .*{message}"):
            getattr(eagle_kernels.raw, name)(**to_device(values, device))
