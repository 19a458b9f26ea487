"""Acceptance to order at the edges of a tree and of a text; test_method_proofs.py holds every policy to its promise."""

from __future__ import annotations

import dataclasses

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from op_tests.engine.toys import DEVICE, ToyModel


@pytest.fixture(scope="module")
def target():
    return ToyModel(device=DEVICE)


def test_no_step_accepts_more_than_it_drafts(target):
    """Deeper levels than drafts are none that could be accepted: a perfect draft is accepted whole."""
    fewer = {"topk": 1, "num_steps": 8, "num_draft_tokens": 4}
    for policy in ({}, {"simulated_accept_length": 4}, {"simulated_accept_rates": (1, 1, 1, 0, 0, 0, 0, 0)}):
        stats = EAGLEInference(target, target, EAGLEConfig(**fewer, **policy)).generate([1, 2], 13).stats
        assert stats.mean_accept_length == 4 and stats.acceptance_rate == stats.draft_efficiency == 1
    table = ((1, (1, 8, 3)), (8, (1, 8, 4)))
    for policy in ({"simulated_accept_length": 4}, {"simulated_accept_rates": (1, 1, 1, 0, 0, 0, 0, 0)}):
        engine = EAGLEInference(target, target, EAGLEConfig(**fewer, **policy, adaptive=table))
        assert engine.generate([1, 2], 13).stats.mean_accept_length == 3
        assert engine.generate([[1, 2], [3]], 13).stats.mean_accept_length == 4


def test_planted_tokens_are_end_tokens_too(target):
    """Unless the caller says that there are none."""
    config = EAGLEConfig(topk=1, num_steps=3, accept_policy="accept_all", eos_token_ids=tuple(range(40)))
    assert EAGLEInference(target, target, config).generate([1], 9).stats.finish_reasons == ["eos"]
    free = dataclasses.replace(config, eos_token_ids=())
    assert EAGLEInference(target, target, free).generate([1], 9).stats.finish_reasons == ["length"]
