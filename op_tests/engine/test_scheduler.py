"""Requests that join and leave between steps: each has the text that it has alone, whatever runs beside it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import pkgutil
import random
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.serve.benchmark import _Decoding
from eagle_kernels.engine.serve.scheduler import host_lag
from eagle_kernels.engine.serve.warmup import COMMON_PARAMS
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.toys import ToyModel, random_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARAMS = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=14, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1, temperature=0.7, top_k=10, seed=4),
    SamplingParams(max_new_tokens=11, temperature=0.9, top_p=0.8, min_p=0.05, seed=5, logprobs=True),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(max_new_tokens=10, temperature=1.2, repetition_penalty=1.1, presence_penalty=0.5, seed=6),
    SamplingParams(max_new_tokens=7, logprobs=True),
]


@pytest.fixture(scope="module")
def target():
    return random_llama(device=DEVICE)


@pytest.fixture(scope="module", params=["stranger", "itself"])
def draft(request, target):
    if request.param == "itself":
        return target
    return random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)


@pytest.fixture(params=[0, 1], ids=["at once", "a step late"])
def lag(request, monkeypatch):
    """How many steps the host is behind; a CPU never is by itself."""
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: request.param)
    return request.param


def make(draft, target, **config):
    return EAGLEInference(draft, target, EAGLEConfig(**{"topk": 3, "num_steps": 3, "max_batch": 3} | config))


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * index) % 61 for index in range(1 + number * 5 % 23)]


def alone(engine, prompt, params, **options):
    """Plain decoding of one request by itself: tokens and log-probabilities."""
    wanted = {name: getattr(params, name) for name in params.__dataclass_fields__ if name != "seed"}
    stream = engine.stream(prompt, seeds=params.seed or 0, speculative=False, **wanted, **options)
    for _ in stream:
        pass
    return stream.requests[0].output_ids, stream.requests[0].logprobs


@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_join_and_leave(target, draft, lag, page_size):
    engine = make(draft, target, page_size=page_size)
    expected = [alone(engine, prompt_of(number), PARAMS[number % len(PARAMS)]) for number in range(14)]
    waiting, requests, events = list(range(14)), [], []
    coin = random.Random(page_size)
    while waiting or engine.has_work:
        for _ in range(coin.randrange(3) if requests else 1):
            if waiting:
                number = waiting.pop(0)
                requests.append(engine.submit(prompt_of(number), PARAMS[number % len(PARAMS)]))
        events += engine.step()
    for number, (request, (tokens, logprobs)) in enumerate(zip(requests, expected)):
        assert request.output_ids == tokens, f"request {number}"
        assert request.finish_reason == "length" and request.error is None
        assert [event.token_id for event in events if event.request == request.id] == tokens
        assert [event.token_id for event in request.collect()] == tokens and request.collect() == []
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert len(logprobs) == (len(tokens) if request.params.logprobs else 0)
    pages = engine._scheduler.pages
    assert pages.num_free == pages.num_pages
    assert not engine._scheduler.state.is_live.any() and (engine._scheduler.state.block_table == -1).all()


def test_rows_move_up(target, draft):
    """The first request ends early, the last one goes on in its row; text and speed do not notice."""
    engine = make(draft, target)
    lengths, widths = [2, 4, 30], []
    want = [engine.generate(prompt_of(number), count)[0] for number, count in enumerate(lengths)]
    requests = [
        engine.submit(prompt_of(number), SamplingParams(max_new_tokens=count)) for number, count in enumerate(lengths)
    ]
    _, runner = engine._scheduler.steps.runners
    run = runner.run
    runner.run = lambda num_rows, features: widths.append(num_rows) or run(num_rows, features)
    engine.collect()
    assert [request.output_ids for request in requests] == want
    assert widths[0] == 3 and widths[-1] == 1


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prompts_in_parts(target, draft, chunk):
    whole, parts = make(draft, target), make(draft, target, prefill_chunk=chunk)
    prompts = [prompt_of(4), prompt_of(9), prompt_of(2)]
    want, stats = whole.generate(prompts, 10, temperature=0.8, seeds=3)
    got, other = parts.generate(prompts, 10, temperature=0.8, seeds=3)
    assert got == want and other.accepted == stats.accepted


def test_steps_go_on_while_a_prompt_is_read(target, draft):
    engine = make(draft, target, prefill_chunk=4)
    first = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40))
    engine.step()
    second = engine.submit(prompt_of(4) * 3, SamplingParams(max_new_tokens=4))
    before = len(first.output_ids)
    for _ in range(3):
        engine.step()
        assert not second.output_ids
    assert len(first.output_ids) >= before + 3 - host_lag(target.device)
    engine.collect()
    assert second.output_ids == engine.generate(prompt_of(4) * 3, 4)[0]


def test_steps_go_on_while_a_stream_reads_its_prompt(target, draft, lag, monkeypatch):
    """Beside who runs; a batch for itself is read without a step between its parts."""
    engine, prompt = make(draft, target, prefill_chunk=4), prompt_of(4) * 3
    want = engine.generate(prompt, 6)[0]
    assert engine._scheduler.num_steps == engine.generate(prompt, 6).stats.batch_steps
    scheduler, parts = engine._scheduler, []
    for name in ("_read_prompt", "_launch_rows"):
        monkeypatch.setattr(scheduler, name, noted(getattr(scheduler, name), parts))
    running = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=90))
    engine.step()
    parts.clear()
    stream = engine.stream(prompt, 6)
    first = next(stream)
    assert parts[:-1] == (len(prompt) // 4) * [4, None] and 0 < parts[-1] <= 4  # None: of a step
    assert [first.token_id, *(event.token_id for event in stream)] == want
    engine.collect()
    assert running.output_ids == engine.generate([1, 2, 3], 90)[0]


def noted(call, results: list):
    def noting(*arguments):
        results.append(call(*arguments))
        return results[-1]

    return noting


def test_an_end_token_of_one_request(target, draft, lag):
    engine = make(draft, target)
    (whole, _) = alone(engine, prompt_of(1), PARAMS[1])
    end = whole[5]
    requests = [
        engine.submit(prompt_of(1), SamplingParams(max_new_tokens=14, temperature=1.0, seed=3, stop_token_ids=(end,))),
        engine.submit(prompt_of(1), PARAMS[1]),
    ]
    engine.collect()
    assert requests[0].output_ids == whole[: whole.index(end) + 1] and requests[0].finish_reason == "eos"
    assert requests[1].output_ids == whole


class LetterTokenizer(ByteTokenizer):
    """Every id below 61 is a letter, some are two."""

    def encode(self, text):
        return [ord(letter) - 64 for letter in text]

    def decode(self, token_ids):
        return "".join(chr(64 + token) * (2 if token % 5 == 0 else 1) for token in token_ids)

    def detokenizer(self, context=()):
        decode = self.decode

        class Detokenizer:
            def push(self, token_ids):
                return decode(token_ids)

            def finish(self):
                return ""

        return Detokenizer()


def test_stop_strings(target, draft, lag):
    """At every place of the text, within a token and over several; text ends before the string, tokens with it."""
    tokenizer = LetterTokenizer()
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=3, num_steps=3), tokenizer=tokenizer)
    whole, _ = engine.generate(prompt_of(1), 12, temperature=1.0, seeds=3)
    text = tokenizer.decode(whole)
    for begin in range(len(text) - 2):
        for size in (1, 3):
            stop = text[begin : begin + size]
            params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, stop=(stop, "~~"))
            request = engine.submit(prompt_of(1), params)
            engine.collect()
            assert request.finish_reason == "stop" and request.text == text[: text.index(stop)]
            ends = text.index(stop) + len(stop)
            shown = tokenizer.decode(request.output_ids)
            assert text.startswith(shown) and len(shown) >= ends > len(tokenizer.decode(request.output_ids[:-1]))
            pieces = list(engine.stream_text(tokenizer.decode([1]), 12, stop=(stop,), temperature=1.0, seeds=3))
            assert stop not in "".join(pieces)
    with pytest.raises(ValueError, match="stop strings need the tokenizer"):
        make(draft, target).submit([1], SamplingParams(stop=("a",)))


@pytest.mark.parametrize(("stop", "reason", "text"), [("?", "stop", "A"), ("??", "length", "A?"), ("A?", "stop", "")])
def test_stop_strings_in_what_is_held_back(target, draft, stop, reason, text):
    """Of a character that the last token leaves unfinished a detokenizer makes something at the end only."""

    class Holding(LetterTokenizer):
        def detokenizer(self, context=()):
            pieces = ["A", ""]  # of a token each, and then of the end

            class Detokenizer:
                def push(self, token_ids):
                    return pieces.pop(0)

                def finish(self):
                    return "?"

            return Detokenizer()

    engine = EAGLEInference(draft, target, tokenizer=Holding())
    request = engine.submit(prompt_of(1), SamplingParams(max_new_tokens=2, stop=(stop,)))
    engine.collect()
    assert (request.finish_reason, request.text) == (reason, text)


def test_a_stop_string_that_never_comes_changes_no_text(target, draft):
    """An end token has a letter, too, and may complete a stop string: text ends before that one."""
    tokenizer = LetterTokenizer()
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=3, num_steps=3), tokenizer=tokenizer)
    prompt, options = tokenizer.decode([1]), {"temperature": 1.0, "seeds": 3}
    whole = engine.generate([1], 12, **options).output_ids
    last = next(index for index in range(3, 12) if whole.index(whole[index]) == index)
    options |= {"stop_token_ids": (whole[last],)}
    shown = tokenizer.decode(whole[: last + 1])
    for stop, text in (("~~", shown), (shown[-2:], shown[: shown.index(shown[-2:])])):
        stream = engine.stream_text(prompt, 12, stop=(stop,), **options)
        assert "".join(stream) == stream._tokens.requests[0].text == text
        if stop == "~~":
            assert "".join(engine.stream_text(prompt, 12, **options)) == text
            assert stream.output().output_ids == whole[: last + 1]
            assert stream.output().stats.finish_reasons == ["eos"]


def test_who_cannot_run_fails_alone(target, draft):
    engine = make(draft, target, kv_cache_bytes=40_000, page_size=4)
    engine.submit([1], SamplingParams(max_new_tokens=1))
    engine.collect()
    num_pages = engine._scheduler.pages.num_pages
    assert num_pages < 3 * (256 // 4), "the pool holds everyone, so the case proves little"
    fine = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5))
    too_long = engine.submit([1] * 250, SamplingParams(max_new_tokens=10))
    empty = engine.submit([], SamplingParams())
    strange = engine.submit([1, 99], SamplingParams())
    engine.collect()
    assert fine.finish_reason == "length" and len(fine.output_ids) == 5
    assert "exceed the 256 tokens" in too_long.error and too_long.finish_reason == "error"
    assert "must hold at least one token" in empty.error and "the prompt holds 99" in strange.error
    tiny = make(draft, target, kv_cache_bytes=10_000, page_size=4)
    full = tiny.submit([1] * 100, SamplingParams(max_new_tokens=100))
    assert "kv_cache_bytes makes it larger" in full.error and not tiny.has_work
    with pytest.raises(ValueError, match="kv_cache_bytes makes it larger"):
        tiny.generate([1] * 100, 100)


def test_lost_pages_are_told_and_not_waited_for(target, draft):
    """Alone in the batch a request cannot wait for the pages of others; those that still fit go on."""
    engine = make(draft, target, page_size=4)
    engine.generate([1, 2, 3], 5)
    free = engine._scheduler.pages._free
    while len(free) > 10:
        free.pop()
    requests = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=count)) for count in (60, 5, 60)]
    engine.collect()
    first, fine, last = requests
    assert fine.finish_reason == "length" and len(fine.output_ids) == 5
    for request in (first, last):
        assert request.finish_reason == "error" and "pages have been lost" in request.error
    with pytest.raises(RuntimeError, match=r"needs \d+ pages, and of .* only 10 are free"):
        engine.generate([1, 2, 3], 60)


def test_abort(target, draft, lag):
    """In line, while its prompt is read, and in mid-flight; the others do not notice."""
    engine = make(draft, target, max_batch=2, prefill_chunk=8)
    want = engine.generate(prompt_of(1), 20)[0]
    running, staying, reading, waiting = (
        engine.submit(prompt, SamplingParams(max_new_tokens=20))
        for prompt in (prompt_of(2), prompt_of(1), prompt_of(4) * 2, prompt_of(3))
    )
    for _ in range(4):
        engine.step()
    assert running.output_ids and not reading.output_ids and not running.is_finished
    engine.abort(running)
    engine.abort(waiting)
    engine.step()
    engine.abort(reading)
    engine.abort(reading)
    kept = list(running.output_ids)
    engine.collect()
    assert staying.output_ids == want
    assert running.output_ids == kept and running.finish_reason == waiting.finish_reason == "abort"
    pages = engine._scheduler.pages
    assert pages.num_free == pages.num_pages


def test_a_stream_that_is_given_up(target, draft, lag):
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 30)
    next(stream)
    stream.close()
    assert not engine.has_work
    assert {request.finish_reason for request in stream.requests} == {"abort"}
    assert stream.output().stats.finish_reasons == ["abort", "abort"]


def test_a_stream_that_is_forgotten(target, draft, lag):
    """Nothing but its owner holds it, so it ends there and then, not whenever a collector comes along."""
    engine = make(draft, target)
    for event in engine.stream([prompt_of(1), prompt_of(2)], 30):
        assert event.token_id >= 0
        break
    assert not engine.has_work
    engine.generate(prompt_of(1), 3, topk=2)


def test_a_stream_that_never_begins(target, draft):
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 30)
    stream.close()
    assert stream.output().stats.finish_reasons == ["abort", "abort"] and next(stream, None) is None
    assert not engine.has_work


def test_a_request_that_is_aborted_before_its_stream_begins(target, draft, lag):
    """It takes no place in the line, nor a row or pages once it is its turn."""
    engine = make(draft, target, max_batch=2)
    want = engine.generate(prompt_of(2), 9)[0]
    both, one = engine.stream([prompt_of(1), prompt_of(2)], 9), engine.stream(prompt_of(1), 9)
    for stream in (both, one):
        engine.abort(stream.requests[0])
    assert [(event.request, event.token_id) for event in both] == [(1, token) for token in want]
    assert not engine.has_work
    running = [engine.submit(prompt_of(2), SamplingParams(max_new_tokens=9)) for _ in range(2)]
    engine.step()
    assert list(one) == [] and not engine._scheduler._waiting
    engine.collect()
    assert [request.output_ids for request in running] == [want, want]
    assert engine._scheduler.pages.num_free == engine._scheduler.pages.num_pages


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
    assert engine._scheduler.pages.num_free == engine._scheduler.pages.num_pages


def test_a_stream_holds_no_pools_before_and_after(target, draft):
    """It begins with those that the engine has then, and lets go of them when it has ended."""
    engine = make(draft, target)
    early, ended = engine.stream(prompt_of(1), 5), engine.stream(prompt_of(1), 5)
    want = list(ended)
    held = weakref.ref(engine._scheduler.state)
    engine.generate(prompt_of(2), 3, page_size=4)
    gc.collect()
    assert held() is None and ended.output().output_ids == [event.token_id for event in want]
    running = engine.submit(prompt_of(2), SamplingParams(max_new_tokens=3))
    assert list(early) == want and early.requests[0].finish_reason == "length"
    engine.collect()
    assert running.finish_reason == "length"


def test_a_stream_is_checked_again_when_it_begins(target, draft):
    """What fitted into the pools that there were may wait for ever for the next ones."""
    engine = make(draft, target)
    stream = engine.stream(prompt_of(1), 100)
    engine.submit([1], SamplingParams(max_new_tokens=9))
    with pytest.raises(RuntimeError, match="another configuration"):
        next(engine.stream(prompt_of(1), 5, topk=2))
    engine.collect()
    engine._scheduler.pages.num_pages = 1
    with pytest.raises(ValueError, match="prompt 0: .* kv_cache_bytes makes it larger"):
        next(stream)


def test_a_stream_is_made_under_the_lock(target, draft, monkeypatch):
    """Another thread may change the configuration at any other time."""
    engine, is_locked = make(draft, target), []
    for name in ("TokenStream", "Scheduler.why_never"):
        path = f"eagle_kernels.engine.inference.{name}"
        made = pkgutil.resolve_name(path)
        monkeypatch.setattr(path, lambda *args, made=made: is_locked.append(engine.lock._is_owned()) or made(*args))
    stream = engine.stream(prompt_of(1), 5)
    assert len(is_locked) > 1 and all(is_locked)
    stream.close()


def test_what_compiles_is_no_step_of_plain_decoding(target, draft, monkeypatch):
    """By a clock that only steps move: new ones by seconds, others by 6 ms."""
    clock, seen, step = SimpleNamespace(now_s=0.0), set(), Stepper.step
    clock.perf_counter = lambda: clock.now_s

    def stepped(self, state, num_rows, features, timer):
        clock.now_s += 0.006 if (num_rows, features) in seen else 5.0
        seen.add((num_rows, features))
        return step(self, state, num_rows, features, timer)

    monkeypatch.setattr(Stepper, "step", stepped)
    monkeypatch.setattr("eagle_kernels.engine.serve.stream.time", clock)
    for is_warm in (False, True):
        engine = make(draft, target, cuda_graph=False)
        seen.clear()
        if is_warm:
            engine.warmup(speculative=False)
            assert engine.plain_step_ms(2) is None
        for num_requests in (1, 2):
            prompts = [prompt_of(1)] * num_requests
            assert engine.generate(prompts, 2, speculative=False).stats.batch_steps == 1
            assert (engine.plain_step_ms(num_requests) is not None) == is_warm
            engine.generate(prompts, 8, speculative=False)
            assert engine.plain_step_ms(num_requests) == pytest.approx(6.0)


def test_what_goes_wrong_for_one_request_is_its_own(target, draft, lag, monkeypatch):
    """In a part of a prompt, and where its tokens are taken."""
    engine = make(draft, target, prefill_chunk=8)
    want = engine.generate(prompt_of(1), 12)[0]
    fine = engine.submit(prompt_of(1), SamplingParams(max_new_tokens=12))
    engine.step()
    forward, broken = target.forward, prompt_of(4) * 2

    def out_of_memory(input_ids, *arguments, **keywords):
        if input_ids.shape[0] == 1 and broken[8 : 8 + input_ids.shape[1]] == input_ids[0].tolist():
            raise RuntimeError("out of memory\nand much more")
        return forward(input_ids, *arguments, **keywords)

    monkeypatch.setattr(target, "forward", out_of_memory)
    failed = engine.submit(broken, SamplingParams(max_new_tokens=5))
    strange = engine.submit(prompt_of(2), SamplingParams(max_new_tokens=5))
    monkeypatch.setattr(strange, "push", lambda *arguments: 1 / 0)
    engine.collect()
    assert failed.finish_reason == "error" and failed.error == "RuntimeError: out of memory"
    assert strange.finish_reason == "error" and strange.error == "ZeroDivisionError: division by zero"
    assert fine.output_ids == want
    pages = engine._scheduler.pages
    assert pages.num_free == pages.num_pages and not engine.has_work
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(broken, 5)
    assert not engine.has_work


class Odd(RuntimeError):
    """Cannot be copied."""

    def __init__(self, text, number):
        super().__init__(f"{text} {number}")


@pytest.mark.parametrize("broken", ["run", "catch_up"])
@pytest.mark.parametrize("error", [MemoryError("no room"), Odd("no room", 7)])
def test_a_step_that_breaks_off_ends_its_requests_alone(target, draft, lag, monkeypatch, error, broken):
    """They say why and leave rows and pages; who waits, and who comes later, does not notice."""
    engine = make(draft, target, max_batch=2)
    want = engine.generate(prompt_of(3), 9).output_ids
    first, second, waiting = (
        engine.submit(prompt_of(number), SamplingParams(max_new_tokens=9)) for number in (1, 2, 3)
    )
    engine.is_speculating = False  # so that the draft has to catch up
    engine.step()
    engine.is_speculating = True

    def breaks(*arguments):
        raise error

    with monkeypatch.context() as patches:
        for runner in engine._scheduler.steps.runners:
            patches.setattr(runner, broken, breaks)
        engine.step()
    assert first.finish_reason == second.finish_reason == "error" and not waiting.is_finished
    assert "no room" in first.error and "no room" in second.error and first.exception is error
    for request in (first, second):
        assert "in breaks" in str(request.exception.__cause__) and request.exception.__traceback__ is None
    assert second.exception is not error and isinstance(second.exception, (MemoryError, RuntimeError))
    engine.collect()
    assert waiting.output_ids == want and engine.generate(prompt_of(3), 9).output_ids == want
    pages = engine._scheduler.pages
    assert pages.num_free == pages.num_pages and not engine._scheduler.state.is_live.any()
    stream = engine.stream([prompt_of(1), prompt_of(2)], 9)
    monkeypatch.setattr(engine._scheduler.steps.runners[1], "run", breaks)
    with pytest.raises(type(error), match="no room"):
        list(stream)
    assert not engine.has_work


class Activation:
    """Something large that a forward pass holds."""


@pytest.mark.parametrize("way", ["submit", "for", "async for"])
def test_what_has_failed_holds_no_memory(target, draft, monkeypatch, way):
    """Of the frames that it was raised in, or raised from, only the places stay, in words."""
    engine, held = make(draft, target), []

    def out_of_memory(*arguments, **keywords):
        activation = Activation()
        held.append(weakref.ref(activation))
        try:
            raise KeyError(activation)
        except KeyError as error:
            raise RuntimeError("out of memory") from error

    monkeypatch.setattr(target, "forward", out_of_memory)
    gc.disable()  # what is in no cycle goes at once
    try:
        try:
            raise ValueError("of the caller, who keeps its traceback")
        except ValueError as error:
            if way != "submit":
                stream = engine.stream([1, 2], 5)
                with pytest.raises(RuntimeError, match="out of memory") as raised:
                    next(stream) if way == "for" else asyncio.run(all_of(stream))
                (request,), origin = stream.requests, raised.value.__cause__
                assert request.exception is None, "it holds the frames of the stream"
            else:
                request = engine.submit([1, 2], SamplingParams(max_new_tokens=5))
                engine.collect()
                origin = request.exception.__cause__
            assert error.__traceback__ is not None
        assert len(held) == 1 and held[0]() is None
    finally:
        gc.enable()
    assert request.error == "RuntimeError: out of memory"
    assert "in out_of_memory" in str(origin)


def test_a_server_loses_no_events_to_streams(target, draft, lag):
    engine = make(draft, target)
    request = engine.submit(prompt_of(1), SamplingParams(max_new_tokens=6))
    engine.generate(prompt_of(2), 20)
    assert request.is_finished and engine.has_work
    assert [event.token_id for event in engine.step()] == request.output_ids and not engine.has_work


def test_streams_side_by_side(target, draft, lag):
    engine = make(draft, target)
    want = [engine.generate(prompt_of(number), 12)[0] for number in range(5)]

    async def read(number):
        return [event.token_id async for event in engine.stream(prompt_of(number), 12)]

    async def read_all():
        return await asyncio.gather(*map(read, range(5)))

    assert asyncio.run(read_all()) == want


def test_a_reader_that_is_cancelled_in_a_step_leaves_nothing(target, draft, lag):
    """As where a server's client hangs up."""
    engine, is_stepping, may_go_on = make(draft, target), threading.Event(), threading.Event()
    want = engine.generate(prompt_of(2), 12)[0]
    step = engine._scheduler.step

    def slow(*arguments):
        is_stepping.set()
        assert may_go_on.wait(60)
        step(*arguments)

    async def read(stream):
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass

    async def hang_up():
        stream = engine.stream(prompt_of(1), 100)
        reader = asyncio.create_task(read(stream))
        await asyncio.to_thread(is_stepping.wait, 60)
        reader.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        return stream.output().stats.finish_reasons

    engine._scheduler.step = slow
    assert asyncio.run(hang_up()) == ["abort"] and not engine.has_work
    assert engine.generate(prompt_of(2), 12)[0] == want


@pytest.mark.parametrize(
    "rest_of",
    [lambda stream: asyncio.run(all_of(stream)), lambda stream: [event.token_id for event in stream]],
    ids=["another event loop", "none"],
)
def test_a_reader_that_is_cancelled_and_goes_on_misses_nothing(target, draft, lag, monkeypatch, rest_of):
    """As where a server waits for a token with a time limit, and tries again; also in another loop, or in none."""
    engine = make(draft, target)
    want = engine.generate(prompt_of(1), 20)[0]
    stream, step, tokens, num_cancelled = engine.stream(prompt_of(1), 20), engine._scheduler.step, [], 0

    def slow(*arguments):
        time.sleep(0.05)
        step(*arguments)

    async def read():
        return await asyncio.wait_for(stream.__anext__(), 0.01)

    async def read_on():
        nonlocal num_cancelled
        while len(tokens) < 12:
            try:
                tokens.append((await read()).token_id)
            except asyncio.TimeoutError:
                num_cancelled += 1
        with contextlib.suppress(asyncio.TimeoutError):
            tokens.append((await read()).token_id)

    monkeypatch.setattr(engine._scheduler, "step", slow)
    asyncio.run(read_on())
    tokens += rest_of(stream)
    assert tokens == want and num_cancelled and not engine.has_work


def test_a_reader_that_is_cancelled_before_its_turn_keeps_nobody_waiting(target, draft):
    """Where all threads of an event loop are busy."""
    engine, may_go_on = make(draft, target), threading.Event()
    want = engine.generate(prompt_of(1), 20)[0]
    stream = engine.stream(prompt_of(1), 20)

    async def read():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, may_go_on.wait, 60)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 0.01)
        tokens = [event.token_id for event in stream]
        may_go_on.set()
        await busy
        return tokens

    assert asyncio.run(read()) == want and not engine.has_work


async def all_of(stream):
    return [event.token_id async for event in stream]


def test_what_a_cancelled_reader_would_have_been_told_the_next_one_is(target, draft, monkeypatch):
    engine, is_stepping, may_go_on = make(draft, target), threading.Event(), threading.Event()
    stream = engine.stream(prompt_of(1), 20)
    next(stream)

    def fail(*arguments):
        is_stepping.set()
        assert may_go_on.wait(60)
        raise MemoryError("in a step")

    async def read():
        item = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(is_stepping.wait, 60)
        item.cancel()
        await asyncio.wait((item,))
        may_go_on.set()
        with pytest.raises(MemoryError, match="in a step"):
            await anext(stream)
        return await anext(stream, "the end")

    monkeypatch.setattr(engine._scheduler, "step", fail)
    assert asyncio.run(read()) == "the end" and not engine.has_work


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


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.gpu)])
def test_many_short_requests_through_a_small_pool(count):
    toy = ToyModel(device=DEVICE)
    engine = EAGLEInference(toy, toy, EAGLEConfig(topk=2, num_steps=2, max_batch=8, kv_cache_bytes=60_000, page_size=4))
    coin = random.Random(0)
    requests = [
        engine.submit([coin.randrange(40)] * coin.randrange(1, 9), SamplingParams(max_new_tokens=coin.randrange(1, 9)))
        for _ in range(count)
    ]
    aborted = set()
    while engine.has_work:
        engine.step()
        if coin.random() < 0.1:
            aborted.add(coin.randrange(count))
            engine.abort(requests[max(aborted)])
    pages = engine._scheduler.pages
    assert pages.num_free == pages.num_pages and len(set(pages._free)) == pages.num_pages
    texts: dict[tuple, list[int]] = {}
    for request in requests:
        assert request.finish_reason in ("length", "abort")
        if request.finish_reason == "length":
            # equal prompts have equal text, however much of it was asked for
            known = texts.setdefault(tuple(request.prompt), request.output_ids)
            size = min(len(known), len(request.output_ids))
            assert (
                known[:size] == request.output_ids[:size] and len(request.output_ids) == request.params.max_new_tokens
            )


def test_warmup_and_workspace(target, draft):
    engine = make(draft, target)
    want = engine.generate(prompt_of(3), 6, temperature=1.0, seeds=2)[0]
    engine.warmup(*PARAMS)
    engine.warmup(speculative=False)
    assert engine.generate(prompt_of(3), 6, temperature=1.0, seeds=2)[0] == want
    sizes = engine.workspace_bytes()
    pool = engine._scheduler.state
    held = [pool.target_pool.k_cache, pool.target_pool.v_cache, pool.draft_pool.k_cache, pool.draft_pool.v_cache]
    assert sizes["kv_cache"] == sum(tensor.numel() * tensor.element_size() for tensor in held)
    rows = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors())
    penalties = sum(pool.sampling.tensors()[index].numel() * 4 for index in (-1, -2))
    assert sizes["rows"] == rows - penalties
    assert sizes["total"] == sizes["kv_cache"] + sizes["rows"] + sizes["step"]
    request = engine.submit([1], SamplingParams(max_new_tokens=3))
    for options, message in (
        ({"logprobs": True}, "logprobs belongs into the SamplingParams that are given, got logprobs=True"),
        ({"nonsense": 1}, "there is no field nonsense in EAGLEConfig or SamplingParams"),
        ({"most_requests": 0}, "most_requests must be None or an int of at least 1, got 0"),
        ({"most_requests": -3}, "most_requests must be None or an int of at least 1, got -3"),
        ({"most_requests": 2.0}, "most_requests must be None or an int of at least 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match="warmup: " + message):
            engine.warmup(SamplingParams(), **options)
    with pytest.raises(RuntimeError, match="warmup needs an empty batch"):
        engine.warmup()
    engine.collect()
    assert request.finish_reason == "length"


METHODS = (None, "ngram", "suffix", "hybrid", "naive", ("draft_model", "ngram"), ("naive", "suffix"))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_workspace_of_every_method(target, method):
    """Methods that read the text keep it beside each row."""
    fields = {"num_model_steps": 1} if method == "hybrid" else {}
    engine = make(CausalDraft(target), target, method=method, num_draft_tokens=8, **fields)
    engine.generate(prompt_of(3), 6)
    held = engine._scheduler.state.tensors()
    assert engine.workspace_bytes()["rows"] == sum(tensor.nbytes for tensor in held)
    never = engine.workspace_bytes(replace(engine.config, max_spec_batch=0))["rows"]
    history = engine._scheduler.state.history
    assert (history is not None) == (method not in (None, "naive"))
    assert history is None or never <= sum(tensor.nbytes for tensor in held) - history.nbytes


def test_the_workspace_of_the_largest_step(target):
    """Of a table's trees, each with as many rows as it is for."""
    small, large = (1, 1, 2), (3, 3, 16)

    def step_bytes(**fields) -> int:
        return make(target, target, max_batch=8, **fields).workspace_bytes()["step"]

    def tree(size: tuple[int, int, int]) -> dict:
        return dict(zip(("topk", "num_steps", "num_draft_tokens"), size))

    assert step_bytes(**tree(small), adaptive=((8, large),)) == step_bytes(**tree(large))
    assert step_bytes(**tree(large), adaptive=((2, large), (8, small))) == step_bytes(**tree(large)) // 4
    assert step_bytes(**tree(large), adaptive=((1, large), (8, small))) == step_bytes(**tree(small))
    assert step_bytes(**tree(large), max_spec_batch=0) == 8 * target.vocab_size * target.dtype.itemsize


COMMON = [
    {"logprobs": logprobs, "seed": 3, **drawn}
    for logprobs in (False, True)
    for drawn in ({}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.9, "min_p": 0.2})
]


def mixed_requests(engine, coin: random.Random, count: int) -> None:
    """Runs so many that ask for what is common, some together; drafts rest and come back meanwhile."""
    for number in range(count):
        params = SamplingParams(max_new_tokens=coin.randrange(1, 9), **coin.choice(COMMON))
        engine.submit(prompt_of(number), params)
        for _ in range(coin.randrange(4)):
            engine.is_speculating = coin.random() < 0.7
            engine.step()
    engine.is_speculating = True
    engine.collect()


@pytest.mark.parametrize("adaptive", [None, "auto"])
def test_after_a_bare_warmup_no_common_request_is_cold(target, adaptive):
    engine = make(target, target, adaptive=adaptive)
    engine.warmup()
    assert engine._scheduler.num_steps == 0, "those that choose would count steps that nobody timed"
    mixed_requests(engine, random.Random(2), 16)
    assert engine._scheduler.num_steps > 16 and engine._scheduler.num_cold_steps == 0


def steps_known(runner) -> set[Features]:
    """The sets of features that it has nothing left to compile or to capture for."""
    return {features for _, features in [*runner._have_run, *runner._graphs]}


def test_how_to_warm_less(target):
    """Given params, or sampling among the overrides, it is these alone."""
    for params, options, warmed in (
        ([SamplingParams()], {}, {Features()}),
        ([], {"temperature": 0.5}, {Features(sampling=True)}),
        ([], {"temperature": 0.5, "top_k": 0, "logprobs": True}, {Features(sampling=True, logprobs=True)}),
        ([], {"topk": 2}, {Features.of([params]) for params in COMMON_PARAMS}),
    ):
        engine = make(target, target, max_batch=1)
        engine.warmup(*params, **options)
        for runner in engine._scheduler.steps.runners:
            assert steps_known(runner) == warmed


def test_what_does_nothing_needs_no_step_of_its_own(target):
    """A step is chosen by what requests need, not by what they name."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0.0}
    for temperature, others, features in (
        (0.8, off, Features(sampling=True)),
        (0.0, off, Features()),
        (0.0, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}, Features()),  # of greedy requests filters change nothing
        (0.8, off | {"top_p": 0.5}, Features(sampling=True, filters=True)),
    ):
        engine = make(target, target)
        engine.generate(prompt_of(1), 4, temperature=temperature, seeds=1, **others)
        assert steps_known(engine._scheduler.steps.runners[1]) == {features}


def test_pools_and_rows_must_fit_into_free_memory(target, monkeypatch):
    """Before anything is allocated; the engine goes on with what fits."""
    engine = make(target, target, max_batch=2)
    want = engine.generate(prompt_of(1), 4).output_ids
    for options in ({"kv_cache_bytes": 1 << 50, "max_batch": 10**9}, {"kv_cache_bytes": 1, "max_batch": 10**10}):
        with pytest.raises(ValueError, match=r"kv_cache_bytes and the rows of max_batch=10+ must fit .* GiB free on c"):
            engine.generate(prompt_of(1), 4, **options)
        assert not engine.has_work and engine.generate(prompt_of(1), 4).output_ids == want
    monkeypatch.setattr("eagle_kernels.engine.batch.memory.free_memory_bytes", lambda device: None)
    options = {"max_batch": 1, "kv_cache_bytes": 1 << 20}
    assert engine.generate(prompt_of(1), 4, **options).output_ids == want, "where nobody says what is free"


def test_the_workspace_of_pools_that_there_are_is_theirs(target, monkeypatch):
    """Half of what is free is less once they are there."""
    engine = make(target, target)
    before = engine.workspace_bytes()
    engine.generate(prompt_of(1), 2)
    monkeypatch.setattr("eagle_kernels.engine.batch.memory._CPU_CACHE_BYTES", 1 << 16)
    monkeypatch.setattr("eagle_kernels.engine.batch.memory.free_memory_bytes", lambda device: 1 << 17)
    assert engine.workspace_bytes() == before
    assert engine.workspace_bytes(EAGLEConfig(max_batch=2))["kv_cache"] <= 1 << 16


def test_benchmark(target):
    engine = make(target, target, num_steps=2, topk=1)
    for topk in (1, 2):
        stats = engine.benchmark([prompt_of(number) for number in range(3)], 13, batch_size=2, topk=topk)
        assert stats.identical == 1.0 and stats.prompts == 3
        assert stats.speculative.tokens == stats.plain.tokens == 39
        assert stats.plain.mean_accept_length == 1.0 and stats.plain.accepted_per_depth == []
        assert stats.speculative.mean_accept_length > 2.5
        for run in (stats.speculative, stats.plain):
            assert run.decode_tokens_per_second > 0 and run.tokens_per_second > 0
            assert set(run.phase_ms) == {"draft", "verify", "sample", "bookkeeping"}
            for times in (run.ttft_ms, run.inter_token_ms):
                assert 0 < times["p50"] <= times["p95"] <= times["p99"]
        assert stats.to_dict()["speedup"] == stats.speedup
        assert '"mean_accept_length"' in stats.to_json()
    assert engine.benchmark([prompt_of(1)], 4, simulated_accept_length=2.0).identical is None  # planted
    assert json.loads(engine.benchmark([prompt_of(1)], torch.tensor(4)).to_json())["max_new_tokens"] == 4
    with pytest.raises(ValueError, match="benchmark: speculative must be left out, both are measured, got False"):
        engine.benchmark([prompt_of(1)], 4, speculative=False)
    for batch_size in (0, 2.0):
        with pytest.raises(ValueError, match=f"batch_size must be an int of at least 1, got {batch_size}"):
            engine.benchmark([[1]], batch_size=batch_size)
    with pytest.raises(ValueError, match=r"benchmark: prompts must hold at least one prompt, got \[\]"):
        engine.benchmark([])


def test_a_benchmark_is_as_wide_as_it_says(target, monkeypatch):
    """Wider than max_batch, no wider than there are prompts; a batch that would wait for itself is refused."""
    widths, step = [], Stepper.step

    def stepped(self, state, num_rows, features, timer):
        widths.append(num_rows)
        return step(self, state, num_rows, features, timer)

    monkeypatch.setattr(Stepper, "step", stepped)
    engine = make(target, target, num_steps=2, topk=1, max_batch=2)
    prompts = [prompt_of(number) for number in range(5)]
    for batch_size, width in ((1, 1), (4, 4), (9, 5)):
        widths.clear()
        stats = engine.benchmark(prompts, 8, batch_size=batch_size)
        assert stats.batch_size == max(widths) == width
        assert dict(stats.rows())["prompts"] == f"5, {width} together, 8 tokens each"
    assert engine.config.max_batch == 2
    widths.clear()
    for options, held in (({"max_batch": 2}, "max_batch=2"), ({"kv_cache_bytes": 120_000}, "max_batch=4")):
        message = f"benchmark: batch_size must be so small that {held} and the pools hold .* got 4; kv_cache_bytes"
        with pytest.raises(ValueError, match=message):
            engine.benchmark(prompts, 100, batch_size=4, **options)
    assert not widths and not engine.has_work


class StepClock:
    """Time that only steps of a batch take: 6 ms each."""

    def __init__(self, monkeypatch):
        self.now_s, step = 0.0, Stepper.step

        def stepped(*arguments):
            self.now_s += 0.006
            return step(*arguments)

        monkeypatch.setattr(Stepper, "step", stepped)

    def perf_counter(self) -> float:
        return self.now_s


def test_latencies_are_those_of_steps(target, lag, monkeypatch):
    """First tokens need none; what a step brings shares its time, also where the end of the text cuts it short."""
    clock = StepClock(monkeypatch)
    for module in ("benchmark", "output"):
        monkeypatch.setattr(f"eagle_kernels.engine.{module}.time", clock)
    # itself as the draft: a step brings 3 tokens, the last one 1 of them here
    decoding = _Decoding(make(target, target, num_steps=2, topk=1, cuda_graph=False))  # replays pass the clock by
    tokens = decoding.add([prompt_of(1), prompt_of(2)], 5, seeds=0)
    assert list(map(len, tokens)) == [5, 5] and decoding._ttft_ms == [0.0, 0.0]
    assert decoding._gaps_ms == pytest.approx(2 * [2.0, 2.0, 2.0, 6.0])


def test_first_tokens_come_before_steps(target, draft, lag):
    """As soon as the prompts are read; of one that ends there, nothing is stepped."""
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 5)
    assert [next(stream).request for _ in range(2)] == [0, 1] and engine._scheduler.num_steps == 0
    rest = list(stream)
    assert len(rest) == 8 and not engine.has_work
    first = stream.requests[0].output_ids[0]
    before = engine._scheduler.num_steps
    ended = engine.stream(prompt_of(1), 5, stop_token_ids=(first,))
    assert [event.token_id for event in ended] == [first] and engine._scheduler.num_steps == before
    assert ended.output().stats.finish_reasons == ["eos"] and not engine.has_work
    # beside one that steps already
    running = engine.submit(prompt_of(3), SamplingParams(max_new_tokens=40))
    for _ in range(3):
        engine.step()
    before = engine._scheduler.num_steps
    joined = engine.stream(prompt_of(1), 5)
    assert next(joined).token_id == first and engine._scheduler.num_steps == before
    assert [first, *(event.token_id for event in joined)] == stream.requests[0].output_ids
    engine.collect()
    assert running.output_ids == engine.generate(prompt_of(3), 40, speculative=False)[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_k": 2**31}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31"),
        ({"presence_penalty": 1e39}, "presence_penalty must be a finite int or float"),
        ({"temperature": float("nan")}, "temperature must be a finite int or float, got nan"),
        ({"top_k": 1.5}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31, got 1.5"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": 2}, "min_p must lie in 0..1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": 2**63}, "seed must be None or an int of 64 bits"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
        ({"stop": "abc"}, "stop must be a tuple of strings that are not empty, got 'abc'"),
        ({"stop": ("",)}, "stop must be a tuple"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must be a tuple of token ids"),
        ({"logprobs": 1}, "logprobs must be True, False or 'raw', got 1"),
        ({"logprobs": "all"}, "logprobs must be True, False or 'raw', got 'all'"),
    ],
)
def test_bad_parameters_are_named(values, message):
    with pytest.raises(ValueError, match="SamplingParams: " + message):
        SamplingParams(**values)


def test_unknown_options_are_named(target, draft):
    with pytest.raises(ValueError, match="there is no field temprature in EAGLEConfig or SamplingParams"):
        make(draft, target).generate([1], temprature=1.0)
    with pytest.raises(ValueError, match="submit takes one prompt"):
        make(draft, target).submit([[1], [2]])
