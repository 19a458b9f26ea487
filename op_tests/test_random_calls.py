"""Calls whose every argument is drawn: sizes, flags, values and their limits, dtypes, strides, buffers, and tile sizes.

Other tests look at what somebody thought of. Here kernel and reference must agree on what nobody did.
"""

from __future__ import annotations

import pytest

from op_tests.harness import to_device
from op_tests.harness.drawn import check_drawn, with_small_tiles
from op_tests.random_calls import CALLS, drawn_call

DRAWS = 16
# scores are read again for each bit of the one that is sought
TILES = {"tree.prune_trees": (32, 64)}
FLOATS = {"tree.select_top_k_tokens": ("scores", "candidate_scores")}


@pytest.mark.parametrize("path", CALLS)
def test_whatever_is_drawn_kernel_and_reference_agree(path, device, monkeypatch):
    for number in range(DRAWS):
        values, coin = drawn_call(path, number)
        with monkeypatch.context() as patched:
            with_small_tiles(path, coin, patched, TILES.get(path, (2, 4, 8)))
            check_drawn(path, to_device(values, device), coin, f"{number}", FLOATS.get(path, ()))
