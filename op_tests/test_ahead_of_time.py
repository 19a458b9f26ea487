"""Every op compiles for every target within that target's shared memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle_kernels.runtime.target import SHARED_MEMORY_BYTES

from .harness.ahead_of_time import PATHS, TARGETS, compile_for_all_targets


@pytest.fixture(scope="module")
def compiled():
    """Records of an op by its path; one child process per op, as many at a time as there are cores."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # its workers already run side by side
        yield compile_for_all_targets
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        children = {path: pool.submit(compile_for_all_targets, path) for path in PATHS}
        yield lambda path: children[path].result()


@pytest.mark.parametrize("path", PATHS)
def test_compiles_for_every_target(path, compiled):
    records = compiled(path)
    assert {record["target"] for record in records} == set(TARGETS)
    for record in records:
        limit = SHARED_MEMORY_BYTES[record["target"]]
        assert record["shared_bytes"] <= limit, f"{record} exceeds the target's {limit} bytes of shared memory"
