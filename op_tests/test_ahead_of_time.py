"""Every op compiles for every target within that target's shared memory, but for what it says it does not support."""

from __future__ import annotations

import importlib

import pytest

from eagle_kernels.runtime.target import SHARED_MEMORY_BYTES

from .harness.ahead_of_time import PATHS, TARGETS, compile_for_all_targets


@pytest.mark.parametrize("path", PATHS)
def test_compiles_for_every_target(path):
    records = compile_for_all_targets(path)
    assert {record["target"] for record in records} == set(TARGETS)
    refused = {(record["case"], record["target"]) for record in records if "refusal" in record}
    module = importlib.import_module("op_tests.ops.{}.test_{}".format(*path.split(".")))
    assert refused == getattr(module, "NOT_SUPPORTED", set())
    for record in records:
        if "refusal" in record:
            continue
        limit = SHARED_MEMORY_BYTES[record["target"]]
        assert record["shared_bytes"] <= limit, f"{record} exceeds the target's {limit} bytes of shared memory"
