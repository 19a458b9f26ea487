"""Acceptance to order in the engine: counts follow the policy, the real acceptance of the draft does not matter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from op_tests.engine.toys import ToyModel

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [4]]


@pytest.fixture(scope="module")
def target():
    return ToyModel(device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", params=["itself", "a stranger"])
def draft(request, target):
    """One whose drafts are all accepted, and one whose are not."""
    return target if request.param == "itself" else ToyModel(seed=1, device=target.device)


def generate(draft, target, *, max_new_tokens=13, prompts=PROMPTS, topk=1, seeds=7, **policy):
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=topk, num_steps=3, **policy))
    return engine.generate(prompts, max_new_tokens, seeds=seeds)


@pytest.mark.cross
def test_all_or_nothing(draft, target):
    _, stats = generate(draft, target, accept_policy="accept_all")
    assert stats.mean_accept_length == 4 and stats.steps == 3 * 3
    text, stats = generate(draft, target, accept_policy="reject_all")
    assert stats.mean_accept_length == 1 and stats.steps == 3 * 12
    assert all(len(tokens) == 13 for tokens in text)


@pytest.mark.cross
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 5, "top_p": 0.9}], ids=str
)
def test_rejecting_all_leaves_the_plain_text(draft, target, sampling, topk):
    """Every step costs its drafts and brings the target's own token, as in FastDeploy."""
    config = EAGLEConfig(topk=topk, num_steps=3, accept_policy="reject_all", **sampling)
    engine = EAGLEInference(draft, target, config)
    assert config.keeps_text and not dataclasses.replace(config, accept_policy="accept_all").keeps_text
    plain, _ = engine.generate(PROMPTS, 13, seeds=7, speculative=False)
    text, stats = engine.generate(PROMPTS, 13, seeds=7)
    assert text == plain and stats.accepted == 0 and stats.steps == 3 * 12 and stats.drafted > 3 * 12


@pytest.mark.slow
def test_simulated_rates_are_met(draft, target):
    rates = (0.9, 0.5, 0.1)
    batch = {"prompts": [[token] for token in range(12)], "seeds": list(range(12)), "max_new_tokens": 24}
    _, stats = generate(draft, target, **batch, accept_policy="simulate", simulated_accept_rates=rates)
    for rate, count in zip(rates, stats.accepted_per_depth):
        sigma = (rate * (1 - rate) / stats.steps) ** 0.5
        assert abs(count / stats.steps - rate) < 4 * sigma, (rate, count, stats.steps)
    mean = sum(rates) + 1
    # of a mean length: no more than one draft of spread, so a third of the noise
    _, of_mean = generate(draft, target, **batch, accept_policy="simulate", simulated_accept_length=mean)
    assert abs(of_mean.mean_accept_length - mean) < 4 * (0.25 / of_mean.steps) ** 0.5
    assert of_mean.accepted_per_depth[0] == of_mean.steps and of_mean.accepted_per_depth[2] == 0


@pytest.mark.cross
def test_a_simulated_request_does_not_see_its_batch(draft, target):
    policy = {"accept_policy": "simulate", "simulated_accept_length": 2.5}
    together, _ = generate(draft, target, seeds=[1, 2, 3], **policy)
    alone = [
        generate(draft, target, prompts=prompt, seeds=seed, **policy)[0] for prompt, seed in zip(PROMPTS, (1, 2, 3))
    ]
    assert together == alone


def test_a_tree_takes_the_path_of_first_children(draft, target):
    """Its depth bounds what can be accepted."""
    _, stats = generate(draft, target, topk=4, accept_policy="accept_all")
    assert 2 < stats.mean_accept_length <= 4
    _, less = generate(draft, target, topk=4, accept_policy="simulate", simulated_accept_length=2.0)
    assert less.accepted_per_depth[:2] == [less.steps, 0]


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


def test_rates_may_be_whole_numbers(target):
    """Of the configuration, or of a smaller tree that accepts all it drafts."""
    for config, tokens in (
        (EAGLEConfig.naive_eagle(simulated_accept_length=2), 2),
        (EAGLEConfig.chain(2, simulated_accept_rates=(1, 1)), 3),
    ):
        assert EAGLEInference(target, target, config).generate([1], 13).stats.mean_accept_length == tokens
    engine = EAGLEInference(target, target, EAGLEConfig.chain(3, adaptive="auto", simulated_accept_length=3.5))
    assert len(engine.generate([1], 30)[0]) == 30


def test_plain_decoding_knows_no_policy(target):
    engine = EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=3))
    plain = engine.generate(PROMPTS, 12, speculative=False)
    for policy in ({"accept_policy": "reject_all"}, {"accept_policy": "simulate", "simulated_accept_length": 2}):
        again = engine.generate(PROMPTS, 12, speculative=False, **policy)
        assert again.output_ids == plain.output_ids


def test_sampling_takes_policies_too(target):
    _, stats = generate(target, target, temperature=1.0, accept_policy="accept_all")
    _, none = generate(target, target, temperature=1.0, accept_policy="reject_all")
    assert stats.mean_accept_length > 2 and none.mean_accept_length == 1


def test_planted_tokens_are_end_tokens_too(target):
    """Unless the caller says that there are none."""
    config = EAGLEConfig(topk=1, num_steps=3, accept_policy="accept_all", eos_token_ids=tuple(range(40)))
    assert EAGLEInference(target, target, config).generate([1], 9).stats.finish_reasons == ["eos"]
    free = dataclasses.replace(config, eos_token_ids=())
    assert EAGLEInference(target, target, free).generate([1], 9).stats.finish_reasons == ["length"]
