"""Where a request ends: at any place of a block that a step brings, exactly there, whatever ends it.

The draft is the target itself, and so sure of it that every step brings the most it can: num_steps + 1 tokens.
"""

from __future__ import annotations

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.causal_draft import CausalDraft
from op_tests.engine.endings import LENGTH, MOST_STEPS, TOKENIZER, endings
from op_tests.engine.engines import prompt_of
from op_tests.engine.toys import random_llama

TREES = [(1, 1), (1, 5), (4, 3), (8, 4)]
ALL_TREES = [(topk, num_steps) for topk in (1, 4, 8) for num_steps in range(1, MOST_STEPS + 1)]


class Sure(CausalDraft):
    """The target's best token at any node outweighs all others together, so no tree misses it."""

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        return output._replace(logits=100 * output.logits)


@pytest.fixture(scope="module")
def target():
    return random_llama(device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def prompt_and_text(target):
    """A prompt whose greedy text says nothing twice: what ends it can be any of its tokens."""
    plain = EAGLEInference(target, target, EAGLEConfig(max_batch=8))
    prompts = [prompt_of(number) for number in range(64)]
    texts = plain.generate(prompts, LENGTH, speculative=False).output_ids
    return next((prompt, text) for prompt, text in zip(prompts, texts) if len(set(text)) == LENGTH)


def make(target, topk, num_steps, **config):
    config = {"topk": topk, "num_steps": num_steps, "max_batch": 4, "max_length": 64} | config
    return EAGLEInference(Sure(target), target, EAGLEConfig(**config), tokenizer=TOKENIZER)


def check_endings(target, prompt_and_text, topk, num_steps, cuda_graph, logprobs=False):
    """logprobs: with them the walk that samples takes the greedy path."""
    prompt, text = prompt_and_text
    engine = make(target, topk, num_steps, cuda_graph=cuda_graph)
    submitted = []
    for last in range(1 + 2 * (num_steps + 1)):
        for reason, params in endings(text, last, logprobs=logprobs).items():
            submitted.append((last, reason, engine.submit(prompt, params)))
    engine.collect()
    for last, reason, request in submitted:
        where = f"{reason} at {last}: {request}"
        assert request.output_ids == text[: last + 1] and request.finish_reason == reason, where
        assert [event.token_id for event in request.collect()] == request.output_ids, where
        assert len(request.logprobs) == (last + 1 if logprobs else 0), where
        # a place of a block is what the case says only if all blocks before it were whole
        assert request.accepted == [num_steps] * -(-last // (num_steps + 1)), where
    pages = engine.session.scheduler.pages
    assert pages.num_free == pages.num_pages and not engine.session.scheduler.state.is_live.any()


@pytest.mark.cross
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("topk, num_steps", TREES)
def test_every_place_of_a_block(target, prompt_and_text, monkeypatch, topk, num_steps, lag):
    """Read at once or a step late: the step after the last one brings nothing more."""
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: lag)
    check_endings(target, prompt_and_text, topk, num_steps, cuda_graph=False)


@pytest.mark.cross
@pytest.mark.parametrize("topk, num_steps", [(1, 3), (4, 3)])
def test_every_place_of_a_block_of_the_walk_that_samples(target, prompt_and_text, topk, num_steps):
    check_endings(target, prompt_and_text, topk, num_steps, cuda_graph=False, logprobs=True)


@pytest.mark.gpu
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("topk, num_steps", ALL_TREES)
def test_every_place_of_a_block_in_graphs(target, prompt_and_text, topk, num_steps, logprobs):
    check_endings(target, prompt_and_text, topk, num_steps, cuda_graph=True, logprobs=logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("topk, num_steps", [(1, 5), (4, 3)])
def test_end_tokens_of_the_configuration(target, prompt_and_text, topk, num_steps, cuda_graph):
    """For all requests of a call; the earliest of several ends each."""
    prompt, text = prompt_and_text
    engine = make(target, topk, num_steps, cuda_graph=cuda_graph)
    for last in range(1 + 2 * (num_steps + 1)):
        ends = (text[last], text[-1])
        (one, other), stats = engine.generate([prompt, prompt], LENGTH + 9, eos_token_ids=ends)
        assert one == other == text[: last + 1] and stats.finish_reasons == ["eos", "eos"]
        assert stats.accepted == stats.steps * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_several_ends_in_one_block(target, prompt_and_text, cuda_graph):
    """The first token that ends a request ends it, not the first rule; a token that does both is an end token."""
    prompt, text = prompt_and_text
    engine = make(target, 4, 5, cuda_graph=cuda_graph)
    for first in range(1, 7):
        for later in range(first, 7):
            stop = (TOKENIZER.decode([text[first]]),)
            limit = {"max_new_tokens": later + 1}
            cases = {
                "stop": SamplingParams(stop=stop, **limit),
                "eos": SamplingParams(stop_token_ids=(text[first],), stop=stop, **limit),
            }
            if later > first:
                cases["length"] = SamplingParams(stop_token_ids=(text[later],), max_new_tokens=first + 1)
            requests = {reason: engine.submit(prompt, params) for reason, params in cases.items()}
            engine.collect()
            for reason, request in requests.items():
                assert (request.output_ids, request.finish_reason) == (text[: first + 1], reason), (first, later)
