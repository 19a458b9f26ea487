"""Requests that join and leave between steps: each has the text that it has alone, whatever runs beside it."""

import dataclasses
import random
from functools import partial

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.state import BatchState
from op_tests.engine import toys
from op_tests.engine.engines import make, prompt_of, trees_by_request
from op_tests.engine.methods import MIXED, PROVEN, SIZES
from op_tests.engine.request_law import check_end, check_tokens
from op_tests.engine.toys import DEVICE, RowWalker, Walker, WalkerHead
from op_tests.engine.view import View

ENDS, TOKENIZER = (17, 18), toys.LetterTokenizer()


def random_params(coin: random.Random, prompt: list[int], number: int, drafters: tuple) -> SamplingParams:
    """Some of all that a request may ask for."""
    kinds = {
        "temperature": (0.0, 0.7, 1.3), "top_k": (0, 0, 8), "top_p": (1.0, 1.0, 0.9), "min_p": (0.0, 0.0, 0.05),
        "repetition_penalty": (1.0, 1.0, 1.4), "frequency_penalty": (0.0, 0.6), "presence_penalty": (0.0, 0.0, 0.9),
        "stop_token_ids": ((), (), (coin.randrange(20), coin.randrange(20))), "ignore_eos": (False, True),
        "stop": ((), (), ("".join(chr(64 + coin.randrange(20)) for _ in range(coin.choice((1, 2)))), "~~")),
        "logprobs": (False, True, "raw"), "top_logprobs": (0, 0, 3),
        "logprob_start_len": (None, None, coin.randrange(len(prompt))), "drafter": drafters,
    }  # fmt: skip
    count = coin.randrange(1, 13)
    asked = {name: coin.choice(values) for name, values in kinds.items()}
    least = coin.choice((0, 0, coin.randrange(1 + count)))
    return SamplingParams(max_new_tokens=count, min_new_tokens=least, seed=coin.choice((7, number)), **asked)


def check_scores(engine, request) -> None:
    """Raw ones, of the output and the prompt, against a pass over the whole text by itself; and its tokens."""
    params, start = request.params, len(request.prompt)
    text = request.prompt + request.output_ids
    if not request.output_ids:  # it was given up before
        return
    logits = toys.plain_logits(engine, text[:-1])
    check_tokens(request, logits[start - 1 :].cpu(), is_seeded=engine.config.verify_strategy == "target_match")
    logprobs = logits.log_softmax(-1)
    rows = [(range(start, len(text)), request.logprobs if params.logprobs == "raw" else [], request.top_logprobs)]
    if params.logprob_start_len is not None:
        own, top, begin = request.prompt_logprobs, request.prompt_top_logprobs, max(params.logprob_start_len, 1)
        skipped = begin - params.logprob_start_len
        rows.append((range(begin, start), own[skipped:], top[skipped:]))
    for places, own, top in rows:
        if own:
            assert own == pytest.approx([logprobs[place - 1, text[place]].item() for place in places], abs=1e-3)
        if params.top_logprobs:
            assert {len(likely) for likely in top} <= {params.top_logprobs}
            for place, likely in zip(places, top, strict=True):
                assert [logprob for _, logprob in likely] == pytest.approx(
                    logprobs[place - 1].topk(len(likely)).values.tolist(), abs=1e-3
                )


BUSY = {
    "head": (WalkerHead, PROVEN["eagle"]),
    "several methods": (Walker, MIXED | {"suffix_decoding_max_cached_requests": 0}),
    "shared rows": (WalkerHead, PROVEN["eagle"] | {"mean_draft_tokens": 4}),
    "drawn": (WalkerHead, {"topk": 2, "num_steps": 3, "verify_strategy": "rejection"}),
}


@pytest.mark.parametrize("name", BUSY)
def test_requests_of_all_kinds_are_those_alone(name, monkeypatch):
    """Text, scores and trees, wherever rows move to, and whoever begins, ends or is given up beside them."""
    (kind, config), goes_by_others = BUSY[name], name == "shared rows"
    coin, drafters = random.Random(name), config.get("method", (None,)) if name == "several methods" else (None,)
    target, draft = RowWalker(**SIZES, device=DEVICE), kind(**SIZES, seed=1, device=DEVICE)
    sizes = {"max_batch": 5, "page_size": 4, "prefill_chunk": 7, "eos_token_ids": ENDS, "max_length": 64}
    config = EAGLEConfig(**config, **sizes, cuda_graph=None if goes_by_others else False)
    engines = [EAGLEInference(draft, target, config, tokenizer=TOKENIZER) for _ in range(2)]
    if not goes_by_others:
        trees = [trees_by_request(engine, monkeypatch) for engine in engines]
    else:  # steps may be graphs, whose trees cannot be watched, and the host is a step behind
        monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 1)
    requests, aborted, moves, move = [], set(), [], BatchState.move
    monkeypatch.setattr(BatchState, "move", lambda state, *rows: moves.append(rows) or move(state, *rows))
    for number in range(24):
        prompt = [coin.randrange(20) for _ in range(coin.randrange(1, 24))]
        params = random_params(coin, prompt, number, drafters)
        if name == "drawn":
            params = dataclasses.replace(params, logprobs=False)
        requests.append(engines[0].submit(prompt, params))
        for _ in range(coin.choice((0, 0, 0, 8))):  # several begin together, and most end before others come
            engines[0].step()
        alive = [request for request in requests if not request.is_finished]
        if alive and coin.random() < 0.2:
            victim = coin.choice(alive)
            aborted.add(victim)
            engines[0].abort(victim)
    engines[0].collect()
    assert len(moves) > 3
    for request in requests:
        single, count = engines[1].submit(request.prompt, request.params), len(request.output_ids)
        engines[1].collect()
        assert request.error is single.error is None
        assert request.output_ids == single.output_ids[:count], request.params
        assert request.logprobs == pytest.approx(single.logprobs[:count], abs=1e-3)
        if request.params.drafter != "suffix" and not goes_by_others:
            num_steps = len(request.accepted)
            assert trees[0][request.id][:num_steps] == trees[1][single.id][:num_steps], request.params
            assert request.accepted == single.accepted[:num_steps], request.params
        if request not in aborted:
            ended, alone = ((each.finish_reason, each.text, count) for each in (request, single))
            assert ended == alone and count == len(single.output_ids), request.params
            check_end(request, TOKENIZER, ENDS)
        check_scores(engines[0], request)
    if len(drafters) > 1:
        assert all((sum(each.accepted) == 0) for each in requests if each.params.drafter == "naive")
        assert {each.params.drafter for each in requests if sum(each.accepted)} == {*drafters} - {"naive"}


def test_a_row_keeps_nothing_of_its_former_request(monkeypatch):
    """One that sets nothing, after one that sets all there is, drafts and ends as in a new engine."""
    kind, config = BUSY["several methods"]
    target, draft = RowWalker(**SIZES, device=DEVICE), kind(**SIZES, seed=1, device=DEVICE)
    config = EAGLEConfig(**{**config, "max_batch": 1, "suffix_decoding_max_cached_requests": 0})
    everything = {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 5,
                  "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_new_tokens": 9, "top_logprobs": 2,
                  "logprobs": True, "stop_token_ids": tuple(range(8))}  # fmt: skip
    prompt, told = [1, 2, 3, 1, 2, 3, 1, 2], {}
    for before in (None, *config.methods):
        with monkeypatch.context() as patch:
            engine = EAGLEInference(draft, target, config)
            trees = trees_by_request(engine, patch)
            if before is not None:
                engine.submit([4, 5, 6], SamplingParams(max_new_tokens=12, drafter=before, **everything))
                engine.collect()
            request = engine.submit(prompt, SamplingParams(max_new_tokens=24))
            engine.collect()
            told[before] = request.output_ids, request.accepted, request.logprobs, trees[request.id]
    assert all(each == told[None] for each in told.values())


@pytest.mark.parametrize(
    "draft", [partial(toys.random_modules, num_modules=2), partial(toys.random_head, aux_layers=(0, 1, 2))]
)
def test_all_that_belongs_to_a_row_moves_with_it(target, draft):
    """Whatever tensors there are with a row for each request, by how they look."""
    engine = make(draft(target), target, method="hybrid", num_model_steps=2, topk=1, max_batch=5)
    engine.generate(prompt_of(1), 3, repetition_penalty=1.2, min_new_tokens=2)
    state = View(engine).state
    held = [*vars(state).values(), *vars(state.sampling).values(), *state.sampling.numbers.values()]
    held += [tensor for kept in state.kept.values() for tensor in kept]
    tensors = [each for each in held if torch.is_tensor(each) and len(each) == state.num_rows]
    assert len(tensors) >= 20
    with torch.inference_mode():
        for tensor in tensors:
            tensor.copy_(torch.arange(state.num_rows).view(-1, *(1 for _ in tensor.shape[1:])))
        state.move(3, 1)
    assert all((tensor[1] == 3).all() for tensor in tensors)


@pytest.mark.parametrize("kind", [Walker, RowWalker])
@pytest.mark.parametrize("num_pages", [60, 9])
def test_requests_have_their_turn_in_the_order_in_which_they_came(kind, num_pages, lag):
    """For rows, for pages, and for the reading of their prompts, part by part, whichever rows are free for them."""
    coin, page_bytes = random.Random(num_pages), 2 * 4 * 4 * 16
    sizes = {"page_size": 4, "prefill_chunk": 4, "max_batch": 3, "kv_cache_bytes": num_pages * page_bytes}
    engine = make(None, kind(device=DEVICE), method="naive", **sizes)
    requests, began, aborted = [], [], set()
    while len(requests) < 30 or engine.has_work:
        for _ in range(coin.choice((0, 0, 1, 2)) if len(requests) < 30 else 0):
            prompt, params = [len(requests)] * 10, SamplingParams(max_new_tokens=coin.randrange(1, 9))
            requests.append(engine.submit(prompt, params))
        if requests and coin.random() < 0.1:
            victim = coin.choice(requests)
            aborted |= {victim} - {request for request in requests if request.is_finished}
            engine.abort(victim)
        began += [event.request for event in engine.step() if event.request not in began]
    pages = View(engine).pages
    assert pages.num_pages == pages.num_free == num_pages
    begins = list(dict.fromkeys(began))
    assert begins == sorted(begins) and {*begins} | {each.id for each in aborted} == {*range(len(requests))}


def test_what_another_engine_aborts_leaves_nothing(target, draft, lag):
    """That engine knows neither its row nor its pages: in mid-flight, while its prompt is read, and in line."""
    engine, other = make(draft, target, max_batch=2, prefill_chunk=8), make(draft, target)
    other.generate([1], 1)
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=60)) for prompt in ([1], prompt_of(4) * 2, prompt_of(3))
    ]
    engine.step()
    for request in requests:
        other.abort(request)
    for _ in range(20):
        engine.step()
    assert not engine.has_work and {request.finish_reason for request in requests} == {"abort"}
    View(engine).check_is_empty()


def test_another_configuration_waits_for_an_empty_batch(target, draft):
    engine = make(draft, target)
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=9))
    engine.step()
    for change in ({"topk": 2}, {"page_size": 4}, {"speculative": False}):
        with pytest.raises(RuntimeError, match="another configuration"):
            engine.generate([1], 2, **change)
    engine.generate([3], 5)  # the same one shares the batch
    engine.collect()
    assert len(request.output_ids) == 9
    engine.generate([1], 2, topk=2, page_size=4)
