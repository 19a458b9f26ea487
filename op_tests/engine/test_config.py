"""EAGLEConfig: defaults, and one clear line for every value that cannot work."""

from __future__ import annotations

import dataclasses

import pytest

from eagle_kernels import EAGLEConfig


def test_defaults():
    config = EAGLEConfig()
    assert (config.topk, config.num_steps, config.num_draft_tokens) == (8, 5, 32)
    assert EAGLEConfig(topk=2, num_steps=3).num_draft_tokens == 1 + 2 + 2 * 4
    assert EAGLEConfig(topk=1, num_steps=5).num_draft_tokens == 6


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EAGLEConfig().topk = 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk": 0}, r"topk must lie in 1..16, got 0"),
        ({"topk": 17}, r"topk must lie in 1..16, got 17"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        (
            {"topk": 2, "num_steps": 3, "num_draft_tokens": 12},
            r"num_draft_tokens must lie in 2..min\(256, 1 \+ topk \+ \(num_steps - 1\) \* topk\^2\) = 11 for topk=2, "
            r"num_steps=3 \(the root counts\), got 12",
        ),
        ({"num_draft_tokens": 1}, "num_draft_tokens must lie in 2"),
        ({"num_draft_tokens": 257}, "= 256 for topk=8"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": 1.5}, "min_p must lie in 0..1"),
        ({"page_size": 24}, "page_size must be a power of two up to 256, got 24"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"tree_mask_mode": "dense"}, "tree_mask_mode must be one of"),
        ({"tree_mask_mode": "qlen_only_bitpacking", "num_draft_tokens": 33}, "at most 32 for qlen_only_bitpacking"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match="EAGLEConfig: .*" + message):
        EAGLEConfig(**values)
