"""The times at which the tokens of a stream came, by token and by round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .stream import TokenStream


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Returns a percentile, linear between the two samples around it as NumPy's; None without samples."""
    return torch.tensor(samples, dtype=torch.float64).quantile(percent / 100).item() if samples else None


def round_times_s(first_s: float, arrivals: Sequence[tuple[float, bool]]) -> list[tuple[float, int]]:
    """Returns (seconds, tokens) of each round after the first token of a request, which came at `first_s`.

    arrivals  of each token after the first: when it came, and whether a draft had guessed it. A round ends with the
              target's own token, or where the request does
    """
    rounds, num_pending, last_s = [], 0, first_s
    for index, (now_s, is_draft) in enumerate(arrivals, 1):
        num_pending += 1
        if not is_draft or index == len(arrivals):
            rounds.append((now_s - last_s, num_pending))
            last_s, num_pending = now_s, 0
    return rounds


class RequestTimes(NamedTuple):
    """first_s: when a request's first token came, by `time.perf_counter`; rounds: see `timing.round_times_s`."""

    first_s: float
    rounds: list[tuple[float, int]]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds of each token after the first; tokens of one round share its time."""
        return [elapsed_s / count for elapsed_s, count in self.rounds for _ in range(count)]


def time_requests(stream: TokenStream) -> list[RequestTimes]:
    """Runs a stream to its end and notes when the tokens of each of its requests come."""
    arrivals: list[list[tuple[float, bool]]] = [[] for _ in stream.requests]
    for event in stream:
        arrivals[event.request].append((time.perf_counter(), event.is_draft))
    return [RequestTimes(first_s, round_times_s(first_s, others)) for (first_s, _), *others in arrivals]
