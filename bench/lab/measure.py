"""One cell of an experiment: all prompts, some at a time, several times over."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.benchmark import percentile, time_requests
from eagle_kernels.engine.serve.output import GenerationStats


@dataclass
class Measurement:
    """Of all runs together, if nothing else is said. Speeds and times are those after the first token of a request."""

    texts: list[list[int]]  # of the last run, by prompt
    tokens: int  # of all runs, first ones included
    tokens_per_second: float  # median of the runs
    per_run: list[float]
    ttft_ms: float  # time to first token: p50 over requests
    inter_token_ms: list[float]  # time before a token: p0, p1, .. p100; what a round brings at once shares its time
    round_ms: dict[str, float]  # time of a round: p50, p95, p99
    mean_accept_length: float  # tokens a step, bonus included
    acceptance_rate: float  # accepted drafts over the most that steps could accept
    accepted_per_depth: list[float]  # share of the steps in which the draft at depth 1, 2, .. was accepted
    phase_ms: dict[str, float]  # device time of a step's draft / verify / sample / bookkeeping
    step_ms: float  # wall time of a step of a batch, median of the runs, of which one may be disturbed
    peak_memory_mib: float | None  # most that torch held on the GPU, graphs that share the pools included; None: no GPU

    def to_dict(self) -> dict[str, Any]:
        """All but the texts, ready for JSON."""
        return {name: _rounded(value) for name, value in asdict(self).items() if name != "texts"}


class Meter:
    """Measures one cell, in parts: between them others may be measured, so that what disturbs a machine for some
    seconds disturbs all alike.

    Each prompt has a seed of its own from `seeds` on, whatever it is batched with. options: of `engine.stream`.
    """

    def __init__(
        self,
        engine: EAGLEInference,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        batch_size: int,
        *,
        seeds: int,
        **options: Any,
    ):
        self._engine, self._prompts, self._options = engine, prompts, options
        self._max_new_tokens, self._batch_size = max_new_tokens, batch_size
        self._seeds = [seeds + index for index in range(len(prompts))]
        self._texts: list[list[int]] = []
        self._ttft_s, self._gaps_s, self._rounds_s = [], [], []
        # of each run, its batches
        self._runs: list[list[GenerationStats]] = []
        self._peak_bytes: int | None = None

    def warm_up(self) -> None:
        """Compiles and captures what the runs need; once more after others, whose pools may have taken its place."""
        self._engine.warmup(most_requests=self._batch_size, **self._options)

    def run(self) -> None:
        """Decodes all prompts once, `batch_size` at a time."""
        is_gpu, device = self._engine.device.type == "cuda", self._engine.device
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        self._texts, stats = [], []
        for prompts, options in self._batches():
            begin_s = time.perf_counter()
            stream = self._engine.stream(prompts, self._max_new_tokens, **options)
            for times in time_requests(stream):
                self._ttft_s.append(times.first_s - begin_s)
                self._rounds_s += [elapsed_s for elapsed_s, _ in times.rounds]
                self._gaps_s += times.gaps_s
            output = stream.output()
            self._texts += output.output_ids
            stats.append(output.stats)
        self._runs.append(stats)
        if is_gpu:
            self._peak_bytes = max(self._peak_bytes or 0, torch.cuda.max_memory_allocated(device))

    def result(self) -> Measurement:
        """Of the runs so far, of which there must be one."""
        stats = [each for run in self._runs for each in run]
        steps, accepted, levels = (
            sum(getattr(each, name) for each in stats) for name in ("steps", "accepted", "levels")
        )
        depths = zip(*(each.accepted_per_depth for each in stats), strict=True)
        timed = [each for each in stats if each.phase_time_ms]
        speeds = [_speed(run) for run in self._runs]
        return Measurement(
            texts=self._texts,
            tokens=sum(each.generated_tokens for each in stats),
            tokens_per_second=statistics.median(speeds),
            per_run=speeds,
            ttft_ms=1e3 * statistics.median(self._ttft_s),
            inter_token_ms=[1e3 * (percentile(self._gaps_s, q) or 0.0) for q in range(101)],
            round_ms={f"p{q}": 1e3 * (percentile(self._rounds_s, q) or 0.0) for q in (50, 95, 99)},
            mean_accept_length=1.0 + accepted / max(1, steps),
            acceptance_rate=accepted / max(1, levels),
            accepted_per_depth=[sum(counts) / max(1, steps) for counts in depths],
            phase_ms={
                name: sum(each.phase_time_ms[name] for each in timed) / max(1, sum(each.batch_steps for each in timed))
                for name in (timed[0].phase_time_ms if timed else ())
            },
            step_ms=statistics.median(map(_step_ms, self._runs)),
            peak_memory_mib=None if self._peak_bytes is None else self._peak_bytes / 2**20,
        )

    def _batches(self) -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
        """Prompts that are decoded together, with their options."""
        for start in range(0, len(self._prompts), self._batch_size):
            batch = slice(start, start + self._batch_size)
            yield list(self._prompts[batch]), self._options | {"seeds": self._seeds[batch]}


def _speed(stats: Sequence) -> float:
    """Tokens a second of all batches of a run."""
    decoded = sum(each.generated_tokens - each.num_requests for each in stats)
    return decoded / max(1e-9, sum(each.decode_time_s for each in stats))


def _step_ms(stats: Sequence) -> float:
    """Time of a step, of all batches of a run."""
    return 1e3 * sum(each.decode_time_s for each in stats) / max(1, sum(each.batch_steps for each in stats))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
