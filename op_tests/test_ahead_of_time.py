"""Every op compiles for every target within that target's shared memory."""

from __future__ import annotations

import pytest

from eagle_kernels.runtime.target import SHARED_MEMORY_BYTES

from .harness.ahead_of_time import PATHS, TARGETS, compile_for_all_targets


@pytest.mark.parametrize("path", PATHS)
def test_compiles_for_every_target(path):
    records = compile_for_all_targets(path)
    assert {record["target"] for record in records} == set(TARGETS)
    for record in records:
        limit = SHARED_MEMORY_BYTES[record["target"]]
        assert record["shared_bytes"] <= limit, f"{record} exceeds the target's {limit} bytes of shared memory"
