"""The engine's own benchmark: what its figures say, and how it shows that it goes on."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace

import numpy
import pytest

from eagle_kernels.engine.benchmark import BenchmarkResult, Decoding
from eagle_kernels.engine.serve.output import GenerationStats
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


def test_figures_of_a_call():
    """Each is the quotient that its name says; those that nothing tells are None or 0."""
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
    assert first.to_dict() == FIRST | {name: getattr(first, name) for name in figures}
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
