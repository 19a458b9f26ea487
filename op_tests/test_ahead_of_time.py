"""Every op compiles for every target within that target's shared memory, but for what it says it does not support."""

from __future__ import annotations

import importlib

import pytest

from eagle_kernels.runtime.target import SHARED_MEMORY_BYTES

from .harness.ahead_of_time import PATHS, TARGETS, compile_for_all_targets
from .ops.attention.cases import HEAD_DIMS


@pytest.mark.parametrize("path", PATHS)
def test_compiles_for_every_target(path):
    records = compile_for_all_targets(path)
    refused = {(record["case"], record["target"]) for record in records if "refusal" in record}
    module = importlib.import_module("op_tests.ops.{}.test_{}".format(*path.split(".")))
    assert refused == getattr(module, "NOT_SUPPORTED", set())
    _check(records)


@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("attention.")])
def test_every_dtype_and_head_dim_compiles(path):
    records = compile_for_all_targets(path, "full_ahead_of_time_cases")
    refused = {(record["case"], record["target"]) for record in records if "refusal" in record}
    module = importlib.import_module("op_tests.ops.{}.test_{}".format(*path.split(".")))
    # a dtype is refused with every head_dim or with none
    dtypes = {(case.split()[0], target) for case, target in module.NOT_SUPPORTED}
    assert refused == {(f"{dtype} D={head_dim}", target) for dtype, target in dtypes for head_dim in HEAD_DIMS}
    _check(records)


def _check(records):
    assert {record["target"] for record in records} == set(TARGETS)
    for record in records:
        if "refusal" in record:
            continue
        limit = SHARED_MEMORY_BYTES[record["target"]]
        assert record["shared_bytes"] <= limit, f"{record} exceeds the target's {limit} bytes of shared memory"
