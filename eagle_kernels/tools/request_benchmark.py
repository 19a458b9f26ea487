"""Many requests of random lengths, sent at once: how many an engine serves per second, and how long each waits. The
load is that of servers' benchmarks: random tokens, and outputs that end only at their length. By default, prompts and
outputs have 0.7 to 1 times their largest length, as in SGLang's naive EAGLE (sgl-project/sglang #7017)."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..engine.benchmark import percentiles, time_requests
from ..engine.inference import EAGLEInference
from ..engine.requests.sampling_params import SamplingParams
from ..engine.serve.stream import open_stream


@dataclass
class RequestRun:
    """Holds the figures of one run; times are milliseconds as {"p50": .., "p95": .., "p99": ..} over the requests."""

    requests: int  # served
    time_s: float
    requests_per_second: float
    input_tokens: int  # of all prompts
    output_tokens: int  # of all outputs
    output_tokens_per_second: float
    total_tokens_per_second: float  # those of prompts included
    mean_accept_length: float  # mean tokens per step of a request, bonus token included
    ttft_ms: dict[str, float]  # from when all requests were sent to the first token of each, time in the queue included
    latency_ms: dict[str, float]  # the same to its last token
    tpot_ms: dict[str, float]  # mean time per token after a request's first one


def random_requests(
    count: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int = 0, **sampling: float
) -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts of random tokens and what each asks for; lengths lie in range_ratio .. 1 of the largest."""
    for name, value in (("requests", count), ("input-len", input_len), ("output-len", output_len)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 < range_ratio <= 1:
        raise ValueError(f"--range-ratio must lie in (0, 1], got {range_ratio}")
    coin = random.Random(seed)

    def length(most: int) -> int:
        return coin.randint(max(1, int(most * range_ratio)), most)

    lengths = [(length(input_len), length(output_len)) for _ in range(count)]
    params = [
        SamplingParams(max_new_tokens=text, seed=seed + number, **sampling) for number, (_, text) in enumerate(lengths)
    ]
    return [([coin.randrange(vocab_size) for _ in range(prompt)], own) for (prompt, _), own in zip(lengths, params)]


def run_requests(
    engine: EAGLEInference, requests: Sequence[tuple[list[int], SamplingParams]], *, speculative: bool = True
) -> RequestRun:
    """Sends all requests at once and serves each to its full length, past end tokens.
    Forgets cached prefixes first, so that their prompts must be read. Raises ValueError if a request can never run."""
    prompts, params = map(list, zip(*requests))
    engine.forget_prefixes()
    config, start_s = replace(engine.config, eos_token_ids=()), time.perf_counter()
    stream = open_stream(engine.session, prompts, params, config, speculative, caller="benchmark")
    times = time_requests(stream)
    time_s, stats = time.perf_counter() - start_s, stream.output().stats
    first_s = [each.first_s - start_s for each in times]
    return RequestRun(
        requests=len(requests), time_s=time_s, requests_per_second=len(requests) / time_s,
        input_tokens=stats.prompt_tokens, output_tokens=stats.generated_tokens,
        output_tokens_per_second=stats.generated_tokens / time_s,
        total_tokens_per_second=(stats.prompt_tokens + stats.generated_tokens) / time_s,
        mean_accept_length=stats.mean_accept_length,
        ttft_ms=percentiles([1e3 * first for first in first_s]),
        latency_ms=percentiles([1e3 * (first + sum(each.gaps_s)) for first, each in zip(first_s, times)]),
        tpot_ms=percentiles([1e3 * fmean(each.gaps_s) for each in times if each.gaps_s]),
    )  # fmt: skip
