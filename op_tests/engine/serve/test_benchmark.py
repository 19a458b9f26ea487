"""The engine's own benchmark: what its figures say, and how it shows that it goes on."""

from __future__ import annotations

import io
import itertools
import json
import random
import sys
from dataclasses import asdict, replace
from statistics import fmean
from types import SimpleNamespace

import numpy
import pytest

from eagle_kernels import SamplingParams
from eagle_kernels.engine import benchmark
from eagle_kernels.engine.benchmark import BenchmarkResult, Decoding
from eagle_kernels.engine.serve.output import GenerationStats
from eagle_kernels.engine.step.runner import StepRunner
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.engines import make, prompt_of
from op_tests.engine.toys import RowWalker


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("screen", [Terminal, io.StringIO, lambda: None], ids=["terminal", "pipe", "none"])
def test_progress(target, monkeypatch, screen):
    """Several prompts have a bar on a terminal; elsewhere, or for one prompt, a bar is shown where it is wanted."""
    pytest.importorskip("tqdm")
    engine = make(target, target, num_steps=2, topk=1)
    prompts = [prompt_of(number) for number in range(3)]
    bare = engine.generate(prompts, 5, progress=False).output_ids

    def shown(call, *arguments, **options) -> str:
        stream = screen()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            result = call(*arguments, **options)
        assert call == engine.benchmark or result.output_ids in (bare, bare[0], bare[:1])
        return stream.getvalue() if stream else ""

    is_terminal, is_open = screen is Terminal, screen() is not None
    assert ("3/3" in shown(engine.generate, prompts, 5)) == is_terminal
    assert ("3/3" in shown(engine.benchmark, prompts, 2)) == is_terminal
    assert shown(engine.generate, prompts, 5, progress=numpy.False_) == ""
    assert shown(engine.generate, prompts, 5, progress=False) == shown(engine.generate, prompts[0], 5) == ""
    assert shown(engine.generate, prompts[:1], 5) == ""
    if is_open:
        text = shown(engine.generate, prompts[0], 5, progress=True)
        assert "1/1" in text and "tokens/s" in text and text.endswith("\n")


def test_progress_ends_with_an_error(target, monkeypatch):
    """The bar is closed; what is no flag, and a bar without tqdm, are refused before anything runs."""
    pytest.importorskip("tqdm")
    engine, stream = make(target, target, num_steps=2, topk=1), Terminal()
    monkeypatch.setattr("sys.stderr", stream)

    def broken(*arguments, **options):
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", broken)
        with pytest.raises(RuntimeError, match="lost"):
            engine.generate([[1], [2]], 3)
    assert stream.getvalue().endswith("\n") and "0/2" in stream.getvalue() and not engine.has_work
    with pytest.raises(ValueError, match="generate: progress must be True or False, got 1"):
        engine.generate([1], 3, progress=1)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match="generate: progress=True needs tqdm: pip install tqdm"):
        engine.generate([1], 3, progress=True)
    assert len(engine.generate([[1], [2]], 3).output_ids) == 2


@pytest.mark.slow
def test_a_benchmark_is_as_wide_as_it_says(target, monkeypatch):
    """Wider than max_batch, no wider than there are prompts; a batch that would wait for itself is refused."""
    widths, step = [], Stepper.step

    def stepped(self, state, num_rows, *rest):
        widths.append(num_rows)
        return step(self, state, num_rows, *rest)

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
        message = f"benchmark: batch_size must let .* fit into the pools and {held}, got 4; kv_cache_bytes"
        with pytest.raises(ValueError, match=message):
            engine.benchmark(prompts, 100, batch_size=4, **options)
    assert not widths and not engine.has_work


class Bar:
    """A bar of tqdm that notes all that it is asked to show."""

    made: list[Bar]

    def __init__(self, total: int, **options):
        self.total, self.count, self.speeds = total, 0, []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def set_postfix_str(self, text: str, refresh: bool):
        self.speeds.append((self.count, text))

    def update(self):
        self.count += 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_bar_counts_what_has_ended(n, lag, monkeypatch):
    """Each request once, when it has ended, with the tokens of all so far by the time until then; batches likewise."""
    clock, bars = StepClock(monkeypatch), []
    for module in ("serve.stream", "generation"):
        monkeypatch.setattr(f"eagle_kernels.engine.{module}.time", clock)
    monkeypatch.setattr(Bar, "made", bars, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
    target = RowWalker()  # as its own draft, all of whose drafts are accepted: up to four tokens a step
    engine = make(target, target, num_steps=3, topk=1, cuda_graph=False, method="draft_model", max_batch=4)
    counts = (5, 14, 2, 9, 6, 14)
    arguments = [[1 + number] for number in range(6)], [SamplingParams(max_new_tokens=count) for count in counts]

    start_s, stream, ended, expected = clock.now_s, engine.stream(*arguments, n=n), set(), []
    for count, event in enumerate(stream, start=1):
        if stream.requests[event.request].is_finished and event.request not in ended:
            expected.append((len(ended), f"{count / (clock.now_s - start_s):.1f} tokens/s"))
            ended.add(event.request)
    engine.generate(*arguments, n=n, progress=True)
    assert [(bar.total, bar.count) for bar in bars] == [(6 * n, 6 * n)] and bars.pop().speeds == expected
    engine.benchmark(*arguments, batch_size=4, progress=True)
    assert [(bar.total, bar.count, bar.speeds) for bar in bars] == [(2, 2, [])]


# statistics of two calls, no two numbers of which are alike
FIRST = {
    "num_requests": 2, "num_steps": 3, "num_draft_tokens": 7, "seeds": [5, 6], "prompt_tokens": 11,
    "generated_tokens": 23, "shared_tokens": 1, "steps": 13, "batch_steps": 8, "levels": 37, "drafted": 73,
    "accepted": 9, "accepted_per_depth": [6, 2, 1], "finish_reasons": ["eos", "length"], "prefill_time_s": 0.25,
    "decode_time_s": 4.0, "cold_steps": 3, "cold_time_s": 2.5, "phase_time_ms": {"draft": 17.0, "verify": 29.0},
    "plain_step_ms": 125.0,
}  # fmt: skip
SECOND = FIRST | {
    "num_requests": 1, "generated_tokens": 10, "steps": 19, "batch_steps": 16, "accepted": 31, "decode_time_s": 2.0,
    "accepted_per_depth": [15, 10, 6], "phase_time_ms": {}, "seeds": [7], "cold_steps": 16, "cold_time_s": 2.0,
}  # fmt: skip


class PlainTimes:
    """Times a plain step when somebody asks, and notes of how many requests it was."""

    def __init__(self):
        self.counts = []

    def time_ms(self, count: int) -> float:
        self.counts.append(count)
        return FIRST["plain_step_ms"]


def test_figures_of_a_call():
    """Each is the quotient that its name says; those that nothing tells are None or 0.

    A time that is taken when somebody asks is told by whatever is read then, and taken once.
    """
    first, second, none = GenerationStats(**FIRST), GenerationStats(**SECOND), GenerationStats(1, 3, 7, [0])
    figures = {
        "mean_accept_length": (1 + 9 / 13, 1 + 31 / 19, 1.0),
        "acceptance_rate": (9 / 37, 31 / 37, 0.0),
        "draft_efficiency": (9 / 73, 31 / 73, 0.0),
        "step_ms": (500.0, 125.0, None),
        "warm_step_ms": (300.0, 125.0, None),  # without a warm step that of all
        "tokens_per_second": (21 / 4, 9 / 2, 0.0),
        "speedup": ((1 + 9 / 13) * 125 / 300, (1 + 31 / 19) * 125 / 125, None),
    }
    for name, expected in figures.items():
        assert [each[name] for each in (first, second, none)] == pytest.approx(expected), name
    assert GenerationStats(**FIRST | {"plain_step_ms": None}).speedup is None
    whole = FIRST | {name: getattr(first, name) for name in figures}
    for told in (GenerationStats.to_dict, lambda stats: {name: stats[name] for name in reversed(whole)}):
        timed, untimed = PlainTimes(), GenerationStats(**FIRST | {"plain_step_ms": None})
        for stats, counts in ((first, []), (untimed.measured_by(timed.time_ms), [2])):
            assert told(stats) == whole == told(stats) and timed.counts == counts
            assert [*stats.to_dict()] == [*whole] and json.loads(json.dumps(stats.to_dict())) == whole
    for name in ("no_such_number", "to_dict", "__dict__", 0):
        with pytest.raises(KeyError):
            first[name]


def test_figures_of_several_batches():
    """Of all of them together, not means of their means; times of phases are of the steps that were timed."""
    third = dict.fromkeys(("num_requests", "generated_tokens", "steps", "accepted", "decode_time_s"), 0)
    third |= {"batch_steps": 4, "accepted_per_depth": [0, 0, 0], "phase_time_ms": {"draft": 7.0, "sample": 6.0}}
    decoding = Decoding()
    decoding._stats = [GenerationStats(**FIRST | changes) for changes in ({}, SECOND, third)]
    decoding._ttft_ms, decoding._gaps_ms, decoding._total_s = [5.0, 1.0, 3.0], [], 11.0
    run, quantiles = decoding.result(), {"p50": 3.0, "p95": 4.8, "p99": 4.96}
    assert asdict(run) == {
        "tokens": 33, "tokens_per_second": 3.0, "decode_tokens_per_second": 5.0, "step_ms": 6e3 / 28,
        "mean_accept_length": 1 + 40 / 32, "accepted_per_depth": [21 / 32, 12 / 32, 7 / 32],
        "phase_ms": {"draft": 2.0, "sample": 0.5, "verify": 29 / 12}, "ttft_ms": pytest.approx(quantiles),
        "inter_token_ms": {},
    }  # fmt: skip
    plain = replace(run, decode_tokens_per_second=4.0, step_ms=125.0, phase_ms={}, accepted_per_depth=[])
    result = BenchmarkResult(6, 2, 8, 50, run, plain, 0.5, 3 * 2**20)
    assert result.to_dict() == asdict(result) | {"speedup": 1.25} == json.loads(result.to_json())
    assert replace(result, plain=replace(plain, decode_tokens_per_second=0.0)).speedup is None
    times = ("  first token, ms", "p50 3.00, p95 4.80, p99 4.96"), ("  between tokens, ms", "")
    assert result.rows() == [
        ("prompts", "6, 2 together, 50 tokens each"),
        ("speculative", "5.0 tokens/s, 214.29 ms a step"),
        ("  phases of a step, ms", "draft 2.000, sample 0.500, verify 2.417"),
        *times, ("plain", "4.0 tokens/s, 125.00 ms a step"), ("  phases of a step, ms", ""), *times,
        ("mean acceptance length", "2.25 (bonus included)"), ("accepted at depth 1, 2, ...", "66%, 38%, 22%"),
        ("speedup", "1.25x"), ("peak memory", "3 MiB"), ("identical", "50% of the batches"),
    ]  # fmt: skip


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


def test_a_benchmark_measures_what_its_clock_says(monkeypatch):
    """Batches of unequal size, each both ways: 50 ms for the prompts of a batch, 6 ms a step; one text that differs."""
    clock, draw_first, add = StepClock(monkeypatch), Stepper.draw_first, Decoding.add

    def drawn(*arguments):
        clock.now_s += 0.05
        return draw_first(*arguments)

    texts = []

    def added(decoding, open_batch):
        tokens = add(decoding, open_batch)
        texts.append(tokens)
        return [[*tokens[0][:-1], 0], *tokens[1:]] if len(texts) == 3 else tokens

    monkeypatch.setattr(Stepper, "draw_first", drawn)
    monkeypatch.setattr(Decoding, "add", added)
    for module in ("benchmark", "serve.stream"):
        monkeypatch.setattr(f"eagle_kernels.engine.{module}.time", clock)
    target = RowWalker()  # as its own draft, all of whose drafts are accepted: three tokens a step
    engine = make(target, target, num_steps=2, topk=1, cuda_graph=False, method="draft_model", phase_times=False)
    result = engine.benchmark([[1], [2, 3], [4], [5], [6]], 13, batch_size=2)
    assert (result.prompts, result.batch_size, result.max_new_tokens, len(texts)) == (5, 2, 13, 6)
    assert result.identical == pytest.approx(2 / 3) and result.speedup == pytest.approx(3)
    for run, num_steps, accepted in ((result.speculative, 4, 2), (result.plain, 12, 0)):
        assert run.tokens == 65 and run.mean_accept_length == 1 + accepted and run.phase_ms == {}
        assert run.accepted_per_depth == [1.0] * accepted and run.step_ms == pytest.approx(6)
        assert run.tokens_per_second == pytest.approx(65 / (3 * (0.05 + 0.006 * num_steps)))
        assert run.decode_tokens_per_second == pytest.approx(60 / (3 * 0.006 * num_steps))
        assert run.ttft_ms == pytest.approx(dict.fromkeys(("p50", "p95", "p99"), 50))
        assert run.inter_token_ms == pytest.approx(dict.fromkeys(("p50", "p95", "p99"), 6 / (1 + accepted)))


def test_times_of_phases_are_those_of_the_steps_that_are_timed(lag, monkeypatch):
    """Their mean, once for each step of the call, whichever other calls there were; a benchmark's are of one step."""
    drawn = random.Random(lag)
    monkeypatch.setattr("eagle_kernels.engine.step.phases.TIMED_STEPS", 2)
    timed = []

    def read(runner) -> dict[str, float]:
        timed.append({name: drawn.uniform(1, 9) for name in ("draft", "verify", "sample", "bookkeeping")})
        return timed[-1]

    monkeypatch.setattr(StepRunner, "phases_ms", read)
    target = RowWalker()
    engine = make(target, target, num_steps=2, topk=1, cuda_graph=False, method="draft_model")
    for index, (count, speculative) in enumerate(itertools.product((4, 12, 29), (True, False))):
        timed.clear()
        stats = engine.generate([[1], [2, 3]][: 1 + index % 2], count, speculative=speculative).stats
        assert len(timed) >= stats.batch_steps / 3 and (lag or len(timed) == stats.batch_steps)
        mean_ms = {name: fmean(phases[name] for phases in timed) for name in timed[0]}
        assert stats.phase_time_ms == pytest.approx({name: ms * stats.batch_steps for name, ms in mean_ms.items()})
    timed.clear()
    result = engine.benchmark([[1], [2], [3]], 14, batch_size=2)
    values = [ms for phases in timed for ms in phases.values()]
    assert all(
        min(values) <= ms <= max(values) for run in (result.speculative, result.plain) for ms in run.phase_ms.values()
    )
    assert engine.generate([1], 1).stats.phase_time_ms == {}


@pytest.mark.parametrize("batch_size", [2, 3])
def test_each_prompt_of_a_benchmark_has_what_it_asks_for(batch_size, monkeypatch):
    """In whichever batch it is: its own text, both ways, after a prompt read anew; a warm-up is of a few tokens."""
    opened, opening = [], benchmark.open_stream

    def watched(session, prompts, params, *rest, **options):
        stream = opening(session, prompts, params, *rest, **options)
        opened.append(stream.requests)
        return stream

    monkeypatch.setattr(benchmark, "open_stream", watched)
    target = RowWalker()
    engine = make(target, target, num_steps=2, topk=1, method="draft_model", share_prefixes=True, page_size=1)
    prompts, counts = [[1 + number, 30] for number in range(5)], (11, 3, 14, 9, 12)
    drawn = {"temperature": 0.9, "min_new_tokens": 3, "stop_token_ids": (30,)}
    params = [SamplingParams(max_new_tokens=count, seed=count, **drawn if count > 11 else {}) for count in counts]
    texts, shared = engine.generate(prompts, params).output_ids, engine.generate(prompts, params)
    assert shared.stats.shared_tokens > 0 and shared.output_ids == texts
    result = engine.benchmark(prompts, params, batch_size=batch_size)
    assert result.speculative.tokens == result.plain.tokens == sum(map(len, texts)) and result.max_new_tokens == 14
    num_batches, told = -(-5 // batch_size), {True: [], False: []}
    for number, requests in enumerate(opened):
        for request in requests:
            own, is_warm_up = params[prompts.index(request.prompt)], number < num_batches + 2
            if is_warm_up and request.output_ids:
                own = replace(own, max_new_tokens=min(8, own.max_new_tokens), seed=0)
            assert request.params == own and request.shared_tokens == 0
            told[is_warm_up].append((request.prompt, request.output_ids))
    assert sorted(told[False]) == sorted(2 * [*zip(prompts, texts)]) and len(opened) == 3 * num_batches + 2


@pytest.mark.parametrize(
    ("strategy", "temperatures"),
    [("target_match", (0, 1)), ("rejection", (0, 0)), ("rejection", (0, 1)), ("typical", (1, 0)), ("topp", (0, 0))],
)
def test_texts_that_differ_by_design_are_not_compared(strategy, temperatures, target):
    """If one request alone is such that both ways may draw different tokens for it."""
    engine = make(target, target, num_steps=1, topk=1, method="draft_model", verify_strategy=strategy)
    params = [SamplingParams(max_new_tokens=2, temperature=temperature) for temperature in temperatures]
    keeps_text = strategy == "target_match" or strategy != "topp" and not any(temperatures)
    assert engine.benchmark([[1], [2]], params).identical == (1.0 if keeps_text else None)
