"""The engine's own benchmark and the latencies that it reports."""

from __future__ import annotations

import io
import json
import sys

import numpy
import pytest
import torch

from eagle_kernels import SamplingParams
from eagle_kernels.engine.benchmark import Decoding
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.engines import make, prompt_of


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
    with pytest.raises(ValueError, match="benchmark: speculative must not be given, since both ways are measured"):
        engine.benchmark([prompt_of(1)], 4, speculative=False)
    for batch_size in (0, 2.0):
        with pytest.raises(ValueError, match=f"batch_size must be an int of at least 1, got {batch_size}"):
            engine.benchmark([[1]], batch_size=batch_size)
    with pytest.raises(ValueError, match=r"benchmark: prompts must hold at least one prompt, got \[\]"):
        engine.benchmark([])


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
    monkeypatch.setattr("eagle_kernels.engine.benchmark.time", clock)
    # itself as the draft: a step brings 3 tokens, the last one 1 of them here
    engine = make(target, target, num_steps=2, topk=1, cuda_graph=False)  # replays pass the clock by
    decoding = Decoding()
    tokens = decoding.add(lambda: engine.stream([prompt_of(1), prompt_of(2)], 5, seeds=0))
    assert list(map(len, tokens)) == [5, 5] and decoding._ttft_ms == [0.0, 0.0]
    assert decoding._gaps_ms == pytest.approx(2 * [2.0, 2.0, 2.0, 6.0])


@pytest.mark.cross
def test_first_tokens_come_before_steps(target, draft, lag):
    """As soon as the prompts are read; of one that ends there, nothing is stepped, but beside others."""
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 5)
    assert [next(stream).request for _ in range(2)] == [0, 1] and engine.session.scheduler.num_steps == 0
    rest = list(stream)
    assert len(rest) == 8 and not engine.has_work
    first = stream.requests[0].output_ids[0]
    before = engine.session.scheduler.num_steps
    ended = engine.stream(prompt_of(1), 5, stop_token_ids=(first,))
    assert [event.token_id for event in ended] == [first] and engine.session.scheduler.num_steps == before
    assert ended.output().stats.finish_reasons == ["eos"] and not engine.has_work
    # beside one that steps already
    running = engine.submit(prompt_of(3), SamplingParams(max_new_tokens=40))
    for _ in range(3):
        engine.step()
    before = engine.session.scheduler.num_steps
    joined = engine.stream(prompt_of(1), 5)
    assert next(joined).token_id == first and engine.session.scheduler.num_steps == before + 1
    assert [first, *(event.token_id for event in joined)] == stream.requests[0].output_ids
    engine.collect()
    assert running.output_ids == engine.generate(prompt_of(3), 40, speculative=False)[0]
