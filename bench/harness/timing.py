"""Times of one call on the GPU, in microseconds.

graph   one replay of a CUDA graph of many calls, divided by their number: the GPU's time without launch gaps, warm L2
eager   many calls in a row from Python, divided by their number: the longer one of the host's time and the GPU's
host    the host's time in one call, by its own clock: a few calls in a row with nothing before them on the GPU, too few
        to fill its queue, and no wait for their end. What a launch costs Python, however long the kernel runs
cold    one replay of a graph of one call, after the L2 cache was overwritten; contains the start of the replay, ~1 us

Graphs are launched while the GPU is still busy with something else: a slow host does not show in their times.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from .declaration import Run

_SAMPLES = 50
_SAMPLE_US = 1000.0
_MAX_CALLS = 100
# the queue takes about a thousand launches; some providers make sixty in a call
_HOST_CALLS = 8
_HOST_SAMPLES = 100
_HOST_US = 2e5
_CEILING_BYTES = 1 << 30
# about 100 us, in which the host can launch a graph
_HEAD_START_CYCLES = 200_000


class Times(NamedTuple):
    graph_p20_us: float
    graph_p50_us: float
    graph_p80_us: float
    eager_p50_us: float | None = None
    cold_p50_us: float | None = None
    host_p50_us: float | None = None


class Stopwatch:
    """Times of one call `run`, which must already have run once (kernels compiled).

    The graph's samples are taken in ROUNDS, so that those who are compared may take turns: what changes on the machine
    meanwhile meets them all.
    """

    ROUNDS = 5

    def __init__(self, run: Run):
        few = _captured(_repeated(run, 5))
        self._calls = max(1, min(_MAX_CALLS, round(_SAMPLE_US / _sample_us(few.replay, _head_start) * 5)))
        self._run = run
        self._graph = _captured(_repeated(run, self._calls))
        self._samples: list[float] = []

    def take_round(self) -> None:
        self._samples += _samples_us(self._graph.replay, _head_start, _SAMPLES // self.ROUNDS)

    def times(self, graphs_only: bool = False) -> Times:
        """Returns what was sampled, and unless graphs_only, what is sampled now."""
        graph = (_quantile(self._samples, q) / self._calls for q in (0.2, 0.5, 0.8))
        if graphs_only:
            return Times(*graph)
        eager = _samples_us(_repeated(self._run, self._calls))
        # writing twice the cache's size evicts everything in it
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
        once = _captured(self._run)
        cold = _samples_us(once.replay, lambda: (flush.zero_(), _head_start()))
        return Times(*graph, _quantile(eager, 0.5) / self._calls, _quantile(cold, 0.5), host_us(self._run))


def rotated(make: Callable[[], Run], num_bytes: int, least_bytes: int = 0) -> Run:
    """Returns a call whose inputs lie in memory each time, and not in the L2 cache: it goes round calls of `make`.

    num_bytes: what one of them reads; together they read at least twice what the cache holds, and least_bytes.
    """
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    runs = itertools.cycle([make() for _ in range(1 + max(2 * cache_bytes, least_bytes) // num_bytes)])
    return lambda: next(runs)()


def quick_us(run: Run) -> float:
    """About what a `Stopwatch` would find, to choose among settings by."""
    run()
    replay = _captured(_repeated(run, 10)).replay
    return _quantile([_sample_us(replay, _head_start) for _ in range(5)], 0.5) / 10


def host_us(run: Run) -> float:
    """The host's time in one call of `run`, which must already have run once: the median over rounds of a few calls."""
    call_us = _sample_us(_repeated(run, _HOST_CALLS)) / _HOST_CALLS
    rounds = max(5, min(_HOST_SAMPLES, round(_HOST_US / (call_us * _HOST_CALLS))))
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            run()
        samples.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return _quantile(samples, 0.5)


@functools.cache
def ceiling_gb_per_s(kind: str) -> float:
    """What a large "copy" (reads and writes counted), "read" or "write" reaches on this device."""
    source = torch.ones(_CEILING_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    move, passes = {
        "copy": (lambda: target.copy_(source), 2),
        "read": (source.sum, 1),
        "write": (lambda: target.fill_(1.0), 1),
    }[kind]
    move()
    # as the ops are timed, without the host's share: a ceiling that is too low would flatter them
    samples = _samples_us(_captured(move).replay, _head_start)
    return passes * _CEILING_BYTES / _quantile(samples, 0.5) / 1e3


@functools.cache
def ceiling_tflop_per_s() -> float:
    """What a large product of bf16 matrices reaches on this device."""
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    samples = _samples_us(_captured(lambda: left @ right).replay, _head_start)
    return 2 * size**3 / _quantile(samples, 0.5) / 1e6


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph


def _repeated(run: Run, calls: int) -> Callable[[], None]:
    def repeat():
        for _ in range(calls):
            run()

    return repeat


def _samples_us(
    run: Callable[[], object], before: Callable[[], object] = lambda: None, count: int = _SAMPLES
) -> list[float]:
    return [_sample_us(run, before) for _ in range(count)]


def _sample_us(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _head_start() -> None:
    """Keeps the GPU busy until the host has launched what follows: else its time in doing so would be measured too."""
    torch.cuda._sleep(_HEAD_START_CYCLES)


def _quantile(samples: list[float], q: float) -> float:
    return torch.tensor(samples, dtype=torch.float64).quantile(q).item()
