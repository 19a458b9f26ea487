"""SGLang's tests of EAGLE (test/srt/test_eagle_infer.py, test_eagle_infer_naive.py), one by one, on the embedded pair.

Theirs send requests to a server; the same is asked of the engine here: in a batch, and with requests that come and go.
GSM8K is in op_tests/tools/test_load_benchmarks.py.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("safetensors")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import demo_pair

TEXTS = ["import os\n\ndef walk(", "class Stack:\n    def __init__(self", "for index in range(", "x = {'a': 1, "]
CONFIGS = {"naive": EAGLEConfig.naive_eagle(max_batch=8), "tree": EAGLEConfig(topk=8, num_steps=5, max_batch=8)}


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request):
    target, draft = demo_pair()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EAGLEInference.from_pretrained(draft, target, CONFIGS[request.param], device=device)


@pytest.fixture(scope="module")
def prompts(engine):
    return [engine.tokenizer.encode(text) for text in TEXTS]


@pytest.mark.slow
def test_single_generation(engine, prompts):
    """The text is that of the target alone."""
    for prompt in prompts[:2]:
        text = engine.generate(prompt, 24).output_ids
        assert text == engine.generate(prompt, 24, speculative=False).output_ids


@pytest.mark.cross
def test_batch_generation(engine, prompts):
    texts = engine.generate(prompts, 24).output_ids
    assert texts == [engine.generate(prompt, 24).output_ids for prompt in prompts]


@pytest.mark.cross
def test_eos_token(engine, prompts):
    """The text ends with it, also where it is a draft in the middle of a step."""
    whole = engine.generate(prompts[0], 24).output_ids
    for place in (0, 3, 9):
        end = whole[place]
        output = engine.generate(prompts[0], 24, eos_token_ids=(end,))
        assert output.output_ids == whole[: whole.index(end) + 1] and output.stats.finish_reasons == ["eos"]


@pytest.mark.cross
def test_acc_length(engine, prompts):
    """Drafts are accepted: more than 1.5 tokens a step of at most two, more than 2.5 with a tree."""
    accepted = engine.generate(prompts, 48).stats.mean_accept_length
    assert accepted > (1.5 if engine.config.num_steps == 1 else 2.5)


@pytest.mark.cross
def test_request_abort(engine, prompts):
    """Requests that end in the middle leave the others, and the pool, as they were."""
    coin, wanted = random.Random(0), engine.generate(prompts, 32).output_ids
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=32)) for prompt in prompts * 3]
    aborted = set()
    while engine.has_work:
        engine.step()
        if coin.random() < 0.4 and len(aborted) < 6:
            victim = coin.choice([request for request in requests if request.id not in aborted])
            engine.abort(victim)
            aborted.add(victim.id)
    for number, request in enumerate(requests):
        text = wanted[number % len(prompts)]
        assert request.output_ids == (text[: len(request.output_ids)] if request.id in aborted else text)
    pages = engine.session.scheduler.pages
    assert aborted and pages.num_free == pages.num_pages


def test_max_token_one(engine, prompts):
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=1)) for prompt in prompts * 3]
    engine.collect()
    assert [len(request.output_ids) for request in requests] == [1] * 12
    assert {request.finish_reason for request in requests} == {"length"}


def test_logprob_start_len(engine, prompts):
    """As many scores of the prompt as there are tokens from the start on, and one of each new token."""
    output = engine.generate(prompts[0], 4, logprob_start_len=4, logprobs="raw")
    assert len(output.prompt_logprobs) == len(prompts[0]) - 4 and len(output.logprobs) == 4


@pytest.mark.cross
def test_logprob_match(engine, prompts):
    """Scores of new tokens are those that the same text has as a prompt."""
    for prompt in prompts:
        output = engine.generate(prompt, 16, logprobs="raw", top_logprobs=5)
        text = prompt + output.output_ids
        again = engine.generate(text, 1, logprob_start_len=len(prompt), top_logprobs=5)
        assert output.logprobs == pytest.approx(again.prompt_logprobs, abs=1e-3)
        for own, other in zip(output.top_logprobs, again.prompt_top_logprobs):
            assert [value for _, value in own] == pytest.approx([value for _, value in other], abs=1e-3)


def submit_all(engine, prompts: list[list[int]], asked: list[dict]) -> list:
    params = [SamplingParams(**{"max_new_tokens": 12, "seed": number} | each) for number, each in enumerate(asked)]
    requests = [engine.submit(prompts[number % len(prompts)], each) for number, each in enumerate(params)]
    engine.collect()
    return requests


@pytest.mark.slow
def test_logprob_mixed(engine, prompts):
    """Requests with and without scores, with and without likely tokens, greedy and sampled, side by side."""
    asked = [
        {"logprobs": kind, "top_logprobs": top, "temperature": temperature, "logprob_start_len": start}
        for kind in (False, "raw") for top in (0, 5) for temperature in (0, 1.0) for start in (None, 2)
    ]  # fmt: skip
    for request, each in zip(submit_all(engine, prompts, asked), asked):
        assert len(request.output_ids) == 12 and len(request.logprobs) == (12 if each["logprobs"] else 0)
        assert [len(top) for top in request.top_logprobs] == ([5] * 12 if each["top_logprobs"] else [])
        assert bool(request.prompt_logprobs) == (each["logprob_start_len"] is not None)


@pytest.mark.slow
def test_penalty_mixed(engine, prompts):
    """Their list of penalties and least lengths, in one batch: each text is that of plain decoding."""
    asked = [
        {}, {"frequency_penalty": 2.0}, {"presence_penalty": 1.0}, {"min_new_tokens": 12}, {"frequency_penalty": 0.2},
        {"presence_penalty": 0.4}, {"min_new_tokens": 8}, {"frequency_penalty": 0.4, "presence_penalty": 0.8},
        {"frequency_penalty": 0.4, "min_new_tokens": 9}, {"presence_penalty": 0.8, "min_new_tokens": 9},
        {"presence_penalty": -0.3, "frequency_penalty": 1.3, "min_new_tokens": 12},
        {"presence_penalty": 0.3, "frequency_penalty": -1.3, "min_new_tokens": 12},
    ]  # fmt: skip
    ends = tuple(engine.tokenizer.encode("\n (:"))
    asked = [each | {"temperature": number % 2, "stop_token_ids": ends} for number, each in enumerate(asked)]
    for number, (request, each) in enumerate(zip(submit_all(engine, prompts, asked), asked)):
        prompt = prompts[number % len(prompts)]
        plain = engine.generate(prompt, 12, seeds=number, speculative=False, **each).output_ids
        assert request.output_ids == plain and len(plain) >= each.get("min_new_tokens", 0)
