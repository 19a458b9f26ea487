"""`GenerationResult`: of real streams, and as a line of JSON there and back."""

import json

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine import benchmark
from eagle_kernels.tools import measure
from eagle_kernels.tools.measure import GenerationResult
from op_tests.engine.toys import ToyModel

PROMPT = [1, 2, 3, 1, 2, 3]
SPECULATIVE = {
    "acceptance_rate": 0.78, "tokens_per_step": 4.12, "num_speculation_rounds": 3, "draft_time_total_ms": 120.5,
    "verify_time_total_ms": 310.2, "sampling_time_total_ms": 9.3, "per_round_latencies": [0.1, 0.2, 0.3],
}  # fmt: skip


def made(**others) -> GenerationResult:
    values = {"generated_ids": [1, 2, 3, 4, 5], "per_token_latencies": [0.08, 0.09, 0.08, 0.10, 0.09]}
    values |= {"total_time": 0.44, "peak_memory_mb": 1823.0, "time_to_first_token": 0.08}
    return GenerationResult(**values | others)


def engine(device, **config) -> EAGLEInference:
    """A target that drafts for itself: rounds of num_steps + 1 tokens."""
    target = ToyModel(device=device)
    return EAGLEInference(target, target, EAGLEConfig(topk=1, num_steps=3, **config))


def test_what_is_computed():
    result = made()
    assert result.num_tokens == 5 and result.tokens_per_second == pytest.approx(5 / 0.44)
    latencies = (result.latency_p50, result.latency_p95, result.latency_p99)
    assert latencies == pytest.approx((0.09, 0.098, 0.0996))
    assert result.inter_token_latencies == [0.09, 0.08, 0.10, 0.09]
    assert not result.is_speculative
    result = made(**SPECULATIVE)
    assert result.is_speculative
    assert result.latency_p50 == pytest.approx(0.09)
    nothing = GenerationResult([], [], 0.0, None, 0.0)
    assert nothing.tokens_per_second == 0.0 and nothing.latency_p50 is None and nothing.peak_memory_mb is None


def test_one_line_for_people():
    assert made().summary() == "AR  | 5 tok | 11.4 tok/s | p50=90ms p95=98ms | mem=1823MB"
    expected = "SD  | 5 tok | 11.4 tok/s | p50=90ms p95=98ms | mem=1823MB | accept=0.78 rounds=3"
    assert made(**SPECULATIVE).summary() == expected
    assert GenerationResult([], [], 0.0, None, 0.0).summary() == "AR  | 0 tok | 0.0 tok/s | mem=-"


@pytest.mark.parametrize("fields", [{}, SPECULATIVE, {"peak_memory_mb": None}], ids=["plain", "speculative", "cpu"])
def test_there_and_back(fields):
    result = made(**fields)
    line = result.to_json_line()
    assert line.endswith("}\n") and line.count("\n") == 1
    values = json.loads(line)
    assert values == result.to_dict() and GenerationResult.from_dict(values) == result
    for name in ("num_tokens", "tokens_per_second", "latency_p50", "latency_p95", "latency_p99", "is_speculative"):
        assert values[name] == getattr(result, name)
    assert GenerationResult.from_dict(values | {"latency_p50": 7.0}).latency_p50 == result.latency_p50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_token_latencies": [0.1]}, "one entry for each of the 5 generated_ids .latencies of rounds .*, got 1$"),
        (SPECULATIVE | {"per_round_latencies": [1.0]}, "must have num_speculation_rounds = 3 entries, got 1$"),
    ],
)
def test_latencies_of_tokens_and_rounds_are_not_mixed_up(change, message):
    with pytest.raises(ValueError, match=message):
        made(**change)


def test_a_line_with_other_fields_is_refused():
    values = made().to_dict()
    with pytest.raises(ValueError, match="^GenerationResult.from_dict: there is no field total_tme$"):
        GenerationResult.from_dict(values | {"total_tme": 1.0})
    del values["total_time"]
    with pytest.raises(ValueError, match="^GenerationResult.from_dict: total_time is missing$"):
        GenerationResult.from_dict(values)


@pytest.mark.parametrize("is_lagging", [False, True])
def test_of_a_real_stream(is_lagging, device, monkeypatch):
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: int(is_lagging))
    models = engine(device)
    text, stats = models.generate(PROMPT, 15)
    for speculative in (True, False):
        result = GenerationResult.from_stream(models.stream(PROMPT, 15, speculative=speculative))
        assert result.generated_ids == text and len(result.per_token_latencies) == 15
        assert result.per_token_latencies[0] == result.time_to_first_token > 0
        assert sum(result.per_token_latencies) <= result.total_time
        assert (result.peak_memory_mb is None) == (device.type == "cpu")
        assert result.is_speculative == speculative
        if not speculative:
            assert result.num_speculation_rounds is result.per_round_latencies is result.draft_time_total_ms is None
            continue
        # itself as the draft: the first token, three whole rounds, and two tokens of a fourth
        assert result.num_speculation_rounds == stats.steps == 4 and result.accepted_per_depth == [4, 4, 4]
        assert result.acceptance_rate == 1.0 and result.tokens_per_step == 4.0
        assert sum(result.per_round_latencies) == pytest.approx(sum(result.inter_token_latencies))
        assert result.per_token_latencies[1:5] == [result.per_round_latencies[0] / 4] * 4
        assert result.per_token_latencies[-2:] == [result.per_round_latencies[-1] / 2] * 2
        phases = ("draft", "verify", "sampling", "bookkeeping")
        assert all(getattr(result, f"{phase}_time_total_ms") > 0 for phase in phases)


def test_time_is_the_wall_s(device, monkeypatch):
    """Not a sum of latencies: what comes after the last token counts as well."""

    class Clock:
        def __init__(self):
            self.now_s = 0.0

        def perf_counter(self):
            self.now_s += 1.0
            return self.now_s

    clock = Clock()
    for module in (benchmark, measure):
        monkeypatch.setattr(module, "time", clock)
    result = GenerationResult.from_stream(engine(device).stream(PROMPT, 3, speculative=False))
    assert result.per_token_latencies == [1.0, 1.0, 1.0] and result.total_time == 4.0


def test_streams_that_cannot_be_measured(device):
    models = engine(device)
    with pytest.raises(ValueError, match="stream must have 1 request, got 2$"):
        GenerationResult.from_stream(models.stream([PROMPT, PROMPT], 3))
    stream = models.stream(PROMPT, 3)
    next(stream)
    with pytest.raises(ValueError, match="stream must not have begun, got [123] tokens$"):
        GenerationResult.from_stream(stream)
    stream.close()


@pytest.mark.gpu
def test_the_peak_is_that_of_this_run():
    models = engine(torch.device("cuda"))
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # before: of no concern
    GenerationResult.from_stream(models.stream(PROMPT, 8))
    result = GenerationResult.from_stream(models.stream(PROMPT, 8))
    held = torch.cuda.memory_allocated() / 1e6
    assert held <= result.peak_memory_mb < held + 128
