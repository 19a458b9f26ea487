"""Fixtures of the tests of rejection."""

import pytest

from eagle_kernels.ops.rejection import verify_tree_traversal
from eagle_kernels.ops.rejection.shared import prepare_pair


@pytest.fixture
def small_tiles(monkeypatch, device):
    """The interpreter takes its time by the lane; a launch of few small tiles is soon done."""
    if device.type == "cpu":
        for table in (verify_tree_traversal.TUNING, prepare_pair.SLICE_TUNING):
            monkeypatch.setitem(table, "default", {"BLOCK_VOCAB": 64, "num_warps": 4})
        monkeypatch.setitem(prepare_pair.MAP_TUNING, "default", {"BLOCK_TARGET": 32, "BLOCK_DRAFT": 32, "num_warps": 4})
