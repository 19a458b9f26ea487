"""Measures decoding: `EAGLEInference.benchmark`, and when the tokens of a stream arrive, by token and by round."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..runtime.values import is_integer, scalar, shown
from .config.eagle_config import EAGLEConfig
from .requests.inputs import Asked, Params, Prompts, Seeds, read_prompts
from .requests.sampling_params import Features, SamplingParams
from .serve.output import GenerationStats
from .serve.session import Session, read_fields
from .serve.stream import TokenStream, open_stream, progress_bar
from .serve.warmup import warm_up


@dataclass
class RunStats:
    """Holds the figures for one way of decoding all prompts. A request's times start when its batch is submitted.

    Attributes:
        tokens: New tokens of all requests.
        tokens_per_second: The same per second of the whole time, prompts included.
        decode_tokens_per_second: Tokens after the first of each request, per second after the prompts.
        mean_accept_length: Mean tokens per step of a request, bonus token included.
        accepted_per_depth: [num_steps]. Share of the steps in which the draft at depth 1, 2, ... was accepted.
        step_ms: Mean wall time of a step of a batch.
        phase_ms: Device time of the draft, verify, sample and bookkeeping of a step.
        ttft_ms: Time to first token: p50, p95, p99 over the requests.
        inter_token_ms: Time between tokens, likewise; a step's tokens share the time since the previous step.
    """

    tokens: int
    tokens_per_second: float
    decode_tokens_per_second: float
    mean_accept_length: float
    accepted_per_depth: list[float]
    step_ms: float
    phase_ms: dict[str, float]
    ttft_ms: dict[str, float]
    inter_token_ms: dict[str, float]


@dataclass
class BenchmarkResult:
    """Holds the figures for both ways of decoding the same prompts, and how they compare.

    Attributes:
        prompts: Number of prompts.
        batch_size: Prompts decoded together, at most; the last batch may be smaller.
        max_batch: Rows of the pools, raised to batch_size if needed.
        max_new_tokens: Most new tokens of a prompt.
        speculative, plain: The figures with and without drafts.
        identical: Share of the batches whose texts agree; None if they differ by design.
        peak_memory_bytes: Most memory that torch held on the GPU in either; None on the CPU.
    """

    prompts: int
    batch_size: int
    max_batch: int
    max_new_tokens: int
    speculative: RunStats
    plain: RunStats
    identical: float | None
    peak_memory_bytes: int | None

    @property
    def speedup(self) -> float | None:
        """decode_tokens_per_second with drafts over that without; None if no request had a second token."""
        plain = self.plain.decode_tokens_per_second
        return self.speculative.decode_tokens_per_second / plain if plain else None

    def to_dict(self) -> dict[str, object]:
        """Returns fields and speedup, ready for JSON."""
        return asdict(self) | {"speedup": self.speedup}

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def rows(self) -> list[tuple[str, str]]:
        """Returns (label, figures) rows for display."""
        rows = [("prompts", f"{self.prompts}, {self.batch_size} together, {self.max_new_tokens} tokens each")]
        for name, run in (("speculative", self.speculative), ("plain", self.plain)):
            rows.append((name, f"{run.decode_tokens_per_second:.1f} tokens/s, {run.step_ms:.2f} ms a step"))
            phases = ", ".join(f"{phase} {time_ms:.3f}" for phase, time_ms in run.phase_ms.items())
            rows.append(("  phases of a step, ms", phases))
            for label, times in (("first token", run.ttft_ms), ("between tokens", run.inter_token_ms)):
                rows.append((f"  {label}, ms", ", ".join(f"{quantile} {time:.2f}" for quantile, time in times.items())))
        per_depth = ", ".join(f"{share:.0%}" for share in self.speculative.accepted_per_depth)
        rows.append(("mean acceptance length", f"{self.speculative.mean_accept_length:.2f} (bonus included)"))
        rows.append(("accepted at depth 1, 2, ...", per_depth))
        rows.append(("speedup", "-" if self.speedup is None else f"{self.speedup:.2f}x"))
        if self.peak_memory_bytes is not None:
            rows.append(("peak memory", f"{self.peak_memory_bytes / 2**20:.0f} MiB"))
        if self.identical is not None:
            rows.append(("identical", f"{self.identical:.0%} of the batches"))
        return rows


class Decoding:
    """Collects the statistics and latencies of the batches that are decoded in one way."""

    def __init__(self) -> None:
        self._stats: list[GenerationStats] = []
        self._ttft_ms: list[float] = []
        self._gaps_ms: list[float] = []
        self._total_s = 0.0

    def add(self, open_batch: Callable[[], TokenStream]) -> list[list[int]]:
        """Opens a stream and runs it to its end, both of which count as its time; returns its tokens."""
        start_s = time.perf_counter()
        stream = open_batch()
        times = time_requests(stream)
        self._total_s += time.perf_counter() - start_s
        for request in times:
            self._ttft_ms.append(1e3 * (request.first_s - start_s))
            self._gaps_ms += [1e3 * gap_s for gap_s in request.gaps_s]
        tokens, stats = stream.output()
        self._stats.append(stats)
        return tokens

    def result(self) -> RunStats:
        stats = self._stats
        tokens, requests = sum(s.generated_tokens for s in stats), sum(s.num_requests for s in stats)
        steps, batch_steps = sum(s.steps for s in stats), sum(s.batch_steps for s in stats)
        decode_s = sum(s.decode_time_s for s in stats)
        timed_steps, phases_ms = 0, Counter()
        for timed in (s for s in stats if s.phase_time_ms):
            timed_steps += timed.batch_steps
            phases_ms.update(timed.phase_time_ms)
        depths = zip(*(s.accepted_per_depth for s in stats), strict=True)
        return RunStats(
            tokens=tokens, tokens_per_second=tokens / self._total_s,
            decode_tokens_per_second=(tokens - requests) / decode_s if decode_s else 0.0,
            mean_accept_length=1 + sum(s.accepted for s in stats) / max(1, steps),
            accepted_per_depth=[sum(counts) / max(1, steps) for counts in depths],
            step_ms=1e3 * decode_s / max(1, batch_steps),
            phase_ms={name: phases_ms[name] / max(1, timed_steps) for name in sorted(phases_ms)},
            ttft_ms=percentiles(self._ttft_ms), inter_token_ms=percentiles(self._gaps_ms),
        )  # fmt: skip


def benchmark(
    session: Session, config: EAGLEConfig, prompts: Prompts, max_new_tokens: Asked, sampling_params: Params,
    batch_size: int, seeds: Seeds, progress: bool | None, overrides: dict[str, Any],
) -> BenchmarkResult:  # fmt: skip
    """Checks the arguments of `EAGLEInference.benchmark`, and measures."""
    prompts, _ = read_prompts(prompts, "benchmark: prompts", session.tokenizer_for)
    batch_size = scalar(batch_size)
    if not (is_integer(batch_size) and batch_size >= 1):
        raise ValueError(f"benchmark: batch_size must be an int of at least 1, got {shown(batch_size)}")
    if "speculative" in overrides:
        raise ValueError("benchmark: speculative must not be given, since both ways are measured")
    batch_size = min(batch_size, len(prompts))
    overrides = read_fields("benchmark", config, overrides)
    overrides.setdefault("max_batch", max(config.max_batch, batch_size))
    asked = max_new_tokens, sampling_params
    config, params = session.read_call("benchmark", config, len(prompts), *asked, seeds, overrides)
    # prompts are decoded several times, and read each time
    config = replace(config, temperature=max(each.temperature for each in params), share_prefixes=False)
    batches = [slice(start, start + batch_size) for start in range(0, len(prompts), batch_size)]
    max_new_tokens, device = max(each.max_new_tokens for each in params), session.device

    def open_batch(batch: slice, speculative: bool, wanted: Sequence[SamplingParams] = params) -> TokenStream:
        together = [list(prompt) for prompt in prompts[batch]]
        options = {"caller": "benchmark", "first": batch.start}
        return open_stream(session, together, wanted[batch], config, speculative, **options)

    with session.alone("benchmark", config):
        for batch in batches:
            requests = open_batch(batch, True).requests
            if not session.scheduler.holds(requests):
                rule = f"let batches of {max_new_tokens} new tokens fit into the pools and max_batch={config.max_batch}"
                advice = "kv_cache_bytes makes the pools larger"
                raise ValueError(f"benchmark: batch_size must {rule}, got {batch_size}; {advice}")
    few = []
    for each in params:
        most = min(8, each.max_new_tokens)
        few.append(replace(each, max_new_tokens=most, min_new_tokens=min(each.min_new_tokens, most), seed=0))
    kinds = list({Features.of([each]): each for each in params}.values())
    for speculative in (True, False):  # compiles, captures and warms up
        with session.alone("benchmark", config):
            for _ in open_batch(batches[0], speculative, few):
                pass
            if device.type == "cuda":
                warm_up(session, config, kinds, batch_size, speculative)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = {True: Decoding(), False: Decoding()}
    identical = 0
    # every batch both ways, one right after the other, so that disturbances of the machine affect both
    with session.alone("benchmark", config), progress_bar("benchmark", len(batches), "batch", progress) as bar:
        for batch in batches:
            texts = [run.add(partial(open_batch, batch, speculative)) for speculative, run in runs.items()]
            identical += texts[0] == texts[1]
            if bar is not None:
                bar.update()
    share = identical / len(batches) if config.keeps_text else None
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    results = runs[True].result(), runs[False].result()
    return BenchmarkResult(len(prompts), batch_size, config.max_batch, max_new_tokens, *results, share, peak)


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Returns a percentile, interpolated between the two nearest samples like NumPy's; None without samples."""
    return torch.tensor(samples, dtype=torch.float64, device="cpu").quantile(percent / 100).item() if samples else None


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95 and p99 of samples; nothing without any."""
    return {f"p{percent}": percentile(samples, percent) for percent in (50, 95, 99)} if samples else {}


def round_times_s(first_s: float, arrivals: Sequence[tuple[float, bool]]) -> list[tuple[float, int]]:
    """Returns (seconds, tokens) for each round after the first token of a request, which arrived at `first_s`.
    A round ends with the target's own token, or with the request.
    arrivals  for each token after the first: when it arrived, and whether it is an accepted draft"""
    rounds, num_pending, last_s = [], 0, first_s
    for index, (now_s, is_draft) in enumerate(arrivals, 1):
        num_pending += 1
        if not is_draft or index == len(arrivals):
            rounds.append((now_s - last_s, num_pending))
            last_s, num_pending = now_s, 0
    return rounds


class RequestTimes(NamedTuple):
    """Holds when a request's first token arrived, by `time.perf_counter`, and its rounds (see `round_times_s`)."""

    first_s: float
    rounds: list[tuple[float, int]]

    @property
    def gaps_s(self) -> list[float]:
        """Returns the seconds that each token after the first took; the tokens of a round share its time."""
        return [elapsed_s / count for elapsed_s, count in self.rounds for _ in range(count)]


def time_requests(stream: TokenStream) -> list[RequestTimes]:
    """Runs a stream to its end and returns when the tokens of each of its requests arrived."""
    arrivals: list[list[tuple[float, bool]]] = [[] for _ in stream.requests]
    for event in stream:
        arrivals[event.request].append((time.perf_counter(), event.is_draft))
    return [RequestTimes(first_s, round_times_s(first_s, others)) for (first_s, _), *others in arrivals]
