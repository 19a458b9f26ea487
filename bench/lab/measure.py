"""One cell of an experiment: all prompts, some at a time, several times over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.output import time_requests
from eagle_kernels.engine.timing import percentile


@dataclass
class Measurement:
    """Of all runs together, if nothing else is said. Tokens and times are those after the first token of a request.

    texts               of the last run, by prompt
    tokens_per_second   median of the runs; per_run: each of them
    ttft_ms             time to first token: p50 over requests
    inter_token_ms      time before a token: p0, p1, .. p100; what a round brings at once shares its time
    round_ms            time of a round: p50, p95, p99
    mean_accept_length  tokens a step, bonus included
    acceptance_rate     accepted drafts over the most that steps could accept
    accepted_per_depth  share of the steps in which the draft at depth 1, 2, .. was accepted
    phase_ms            device time of a step's draft / verify / sample / bookkeeping
    step_ms             wall time of a step of a batch, median of the runs, of which one may be disturbed
    peak_memory_mib     most that torch held on the GPU; None on the CPU
    """

    texts: list[list[int]]
    tokens: int
    tokens_per_second: float
    per_run: list[float]
    ttft_ms: float
    inter_token_ms: list[float]
    round_ms: dict[str, float]
    mean_accept_length: float
    acceptance_rate: float
    accepted_per_depth: list[float]
    phase_ms: dict[str, float]
    step_ms: float
    peak_memory_mib: float | None

    def to_dict(self) -> dict[str, Any]:
        """All but the texts, ready for JSON."""
        return {name: _rounded(value) for name, value in asdict(self).items() if name != "texts"}


def measure(
    engine: EAGLEInference,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
    num_runs: int,
    *,
    seeds: int,
    **options: Any,
) -> Measurement:
    """Each prompt has a seed of its own from `seeds` on, whatever it is batched with. options: of `engine.stream`."""
    is_gpu, own = engine.device.type == "cuda", [seeds + index for index in range(len(prompts))]
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(engine.device)
    ttft_s, gaps_s, rounds_s, stats, speeds, steps_ms = [], [], [], [], [], []
    for _ in range(num_runs):
        texts, first_of_run = [], len(stats)
        for start in range(0, len(prompts), batch_size):
            batch = slice(start, start + batch_size)
            begin_s = time.perf_counter()
            stream = engine.stream(list(prompts[batch]), max_new_tokens, seeds=own[batch], **options)
            for times in time_requests(stream):
                ttft_s.append(times.first_s - begin_s)
                rounds_s += [elapsed_s for elapsed_s, _ in times.rounds]
                gaps_s += times.gaps_s
            output = stream.output()
            texts += output.output_ids
            stats.append(output.stats)
        speeds.append(_speed(stats[first_of_run:]))
        steps_ms.append(_step_ms(stats[first_of_run:]))
    steps, accepted, levels = (sum(getattr(each, name) for each in stats) for name in ("steps", "accepted", "levels"))
    depths = zip(*(each.accepted_per_depth for each in stats), strict=True)
    timed = [each for each in stats if each.phase_time_ms]
    return Measurement(
        texts=texts,
        tokens=sum(each.generated_tokens for each in stats),
        tokens_per_second=statistics.median(speeds),
        per_run=speeds,
        ttft_ms=1e3 * statistics.median(ttft_s),
        inter_token_ms=[1e3 * (percentile(gaps_s, q) or 0.0) for q in range(101)],
        round_ms={f"p{q}": 1e3 * (percentile(rounds_s, q) or 0.0) for q in (50, 95, 99)},
        mean_accept_length=1.0 + accepted / max(1, steps),
        acceptance_rate=accepted / max(1, levels),
        accepted_per_depth=[sum(counts) / max(1, steps) for counts in depths],
        phase_ms={
            name: sum(each.phase_time_ms[name] for each in timed) / max(1, sum(each.batch_steps for each in timed))
            for name in (timed[0].phase_time_ms if timed else ())
        },
        step_ms=statistics.median(steps_ms),
        peak_memory_mib=torch.cuda.max_memory_allocated(engine.device) / 2**20 if is_gpu else None,
    )


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
