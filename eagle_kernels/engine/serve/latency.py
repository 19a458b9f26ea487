"""Times at which the tokens of a stream arrive, by token and by round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .stream import TokenStream


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Returns a percentile, interpolated between the two nearest samples like NumPy's; None without samples."""
    return torch.tensor(samples, dtype=torch.float64, device="cpu").quantile(percent / 100).item() if samples else None


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95 and p99 of samples; nothing without any."""
    return {f"p{percent}": percentile(samples, percent) for percent in (50, 95, 99)} if samples else {}


def round_times_s(first_s: float, arrivals: Sequence[tuple[float, bool]]) -> list[tuple[float, int]]:
    """Returns (seconds, tokens) for each round after the first token of a request, which arrived at `first_s`.

    A round ends with the target's own token, or with the request.

    arrivals  for each token after the first: when it arrived, and whether it is an accepted draft
    """
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
