"""What one request cost: its result as a record, and device timers for your own code."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.benchmark import percentile, time_requests
from ..engine.serve.output import fields_and_properties, record_of
from ..engine.serve.stream import TokenStream
from ..engine.step.phases import mark, synchronize

# of one name of a `CUDATimerCollection`: the device is never that many intervals behind, so reading the oldest is free
_MOST_UNREAD = 256


@dataclass
class GenerationResult:
    """Holds what one request produced and what it cost; converts to a line of JSON and back.
    `GenerationResult.from_stream(engine.stream(prompt, 128))` measures one. Latencies per token and per round, which
    brings several tokens, are kept apart, so that plain and speculative decoding compare."""

    generated_ids: list[int]  # new tokens
    # s, one per token: the first is time_to_first_token; tokens of one round share its time
    per_token_latencies: list[float]
    total_time: float  # s on the wall, from the request to the end of the stream; not a sum of latencies
    # most that torch held on the GPU meanwhile, in 10^6 bytes, weights and pools included; None: not measured (CPU)
    peak_memory_mb: float | None
    time_to_first_token: float  # s
    # of speculative decoding, None for plain
    acceptance_rate: float | None = None  # accepted drafts over the most that the rounds could accept
    tokens_per_step: float | None = None  # mean of the rounds: accepted drafts and the target's own token
    num_speculation_rounds: int | None = None  # the first token comes before them
    # device time, scaled to all rounds from those that were timed; None where none was
    draft_time_total_ms: float | None = None
    verify_time_total_ms: float | None = None
    sampling_time_total_ms: float | None = None
    bookkeeping_time_total_ms: float | None = None
    per_round_latencies: list[float] | None = None  # s, one per round
    accepted_per_depth: list[int] | None = None  # in how many rounds the draft at depth 1, 2, ... was accepted

    def __post_init__(self) -> None:
        num_latencies, num_tokens = len(self.per_token_latencies), len(self.generated_ids)
        if num_latencies != num_tokens:
            raise ValueError(
                f"GenerationResult: per_token_latencies must have one entry for each of the {num_tokens} "
                f"generated_ids (latencies of rounds belong in per_round_latencies), got {num_latencies}"
            )
        num_rounds = self.num_speculation_rounds
        if None not in (num_rounds, self.per_round_latencies) and len(self.per_round_latencies) != num_rounds:
            raise ValueError(
                f"GenerationResult: per_round_latencies must have num_speculation_rounds = {num_rounds} entries, "
                f"got {len(self.per_round_latencies)}"
            )

    @classmethod
    def from_stream(cls, stream: TokenStream) -> GenerationResult:
        """Runs a stream of one request, which must not have begun, to its end and measures it. On a GPU, torch's peak
        memory is reset first. For batches, use `EAGLEInference.benchmark`."""
        if len(stream.requests) != 1:
            raise ValueError(f"GenerationResult.from_stream: stream must have 1 request, got {len(stream.requests)}")
        (request,), is_gpu = stream.requests, stream.device.type == "cuda"
        if request.output_ids or request.is_finished:
            raise ValueError(
                f"GenerationResult.from_stream: stream must not have begun, got {len(request.output_ids)} tokens"
            )
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(stream.device)
        start_s = time.perf_counter()
        (times,) = time_requests(stream)
        total_s = time.perf_counter() - start_s
        peak = torch.cuda.max_memory_allocated(stream.device) / 1e6 if is_gpu else None
        stats, first_s = stream.output().stats, times.first_s - start_s
        result = cls(list(request.output_ids), [first_s, *times.gaps_s], total_s, peak, first_s)
        if stats.num_draft_tokens > 1:
            phases_ms = stats.phase_time_ms
            result.acceptance_rate, result.tokens_per_step = stats.acceptance_rate, stats.mean_accept_length
            result.num_speculation_rounds, result.per_round_latencies = stats.steps, [s for s, _ in times.rounds]
            result.draft_time_total_ms, result.verify_time_total_ms = phases_ms.get("draft"), phases_ms.get("verify")
            result.sampling_time_total_ms = phases_ms.get("sample")
            result.bookkeeping_time_total_ms = phases_ms.get("bookkeeping")
            result.accepted_per_depth = stats.accepted_per_depth
        return result

    @property
    def num_tokens(self) -> int:
        return len(self.generated_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole time, prompt included; 0.0 if no time passed."""
        return self.num_tokens / self.total_time if self.total_time else 0.0

    @property
    def is_speculative(self) -> bool:
        return self.acceptance_rate is not None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Latencies in s of all tokens but the first."""
        return self.per_token_latencies[1:]

    @property
    def latency_p50(self) -> float | None:
        """Median s per token, the first included (p95 and p99 likewise); None without tokens."""
        return percentile(self.per_token_latencies, 50)

    @property
    def latency_p95(self) -> float | None:
        return percentile(self.per_token_latencies, 95)

    @property
    def latency_p99(self) -> float | None:
        return percentile(self.per_token_latencies, 99)

    def to_dict(self) -> dict[str, Any]:
        """Returns fields and properties, ready for JSON."""
        return fields_and_properties(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationResult:
        """Reads what `to_dict` made; properties are recomputed."""
        return record_of(cls, values)

    def to_json_line(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"

    def summary(self) -> str:
        """Returns one line: AR or SD, tokens, speed, latency, peak memory, acceptance and rounds if speculative."""
        shown = [f"{'SD' if self.is_speculative else 'AR':<3}", f"{self.num_tokens} tok"]
        shown.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.num_tokens:
            shown.append(f"p50={1e3 * self.latency_p50:.0f}ms p95={1e3 * self.latency_p95:.0f}ms")
        shown.append("mem=-" if self.peak_memory_mb is None else f"mem={self.peak_memory_mb:.0f}MB")
        if self.is_speculative:
            rounds = "-" if self.num_speculation_rounds is None else self.num_speculation_rounds
            shown.append(f"accept={self.acceptance_rate:.2f} rounds={rounds}")
        return " | ".join(shown)


def cuda_sync_time(device: str | torch.device | None = None) -> float:
    """Returns wall-clock seconds, once everything queued on the device is done; None: the GPU if there is one. This
    waits for everything that is queued; to time part of a stream without that, use `CUDATimer`."""
    synchronize(_device(device))
    return time.perf_counter()


class CUDATimer:
    """Times the block of `with CUDATimer() as timer:` on the device, by two events on its current stream. Neither end
    waits for anything. `elapsed_ms` waits only for the second event: whatever was queued after it, or on other streams,
    goes on. For the CPU, it reads the wall clock.

    device  None: the current GPU if there is one, else the CPU
    """

    def __init__(self, device: str | torch.device | None = None):
        self._device = _device(device)
        self._start: torch.cuda.Event | float | None = None
        self._end: torch.cuda.Event | float | None = None

    def __enter__(self) -> CUDATimer:
        self._end = None
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:  # else there is nothing to end
            self._end = self._now()

    @property
    def elapsed_ms(self) -> float:
        """The time in ms; raises RuntimeError before the block has ended."""
        if self._end is None:
            state = "was never entered" if self._start is None else "is still running"
            raise RuntimeError(f"CUDATimer: elapsed_ms can be read only after the with block; this one {state}")
        if isinstance(self._end, float):
            return 1e3 * (self._end - self._start)
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _now(self) -> torch.cuda.Event | float:
        return mark(self._device) if self._device.type == "cuda" else time.perf_counter()

    def __repr__(self) -> str:
        return f"CUDATimer({'not finished' if self._end is None else f'{self.elapsed_ms:.3f} ms'})"


class CUDATimerCollection:
    """Times intervals by name, which may repeat and overlap: draft, verify, sample, bookkeeping, or any others.

    `with timers.phase("verify"):` waits for nothing until a time is read; `start` and `stop` are for where a block does
    not fit, and since `stop` returns its interval's time, it waits for the interval to finish.
    `elapsed_ms` and `summary` give the sum of all intervals of a name since the last `reset`.
    """

    def __init__(self, device: str | torch.device | None = None):
        self._device = _device(device)
        self.reset()

    def start(self, name: str) -> None:
        """Starts an interval; raises RuntimeError if one of this name is running."""
        if name in self._running:
            raise RuntimeError(f"CUDATimerCollection.start: {name!r} is running; stop it first")
        self._running[name] = CUDATimer(self._device).__enter__()

    def stop(self, name: str) -> float:
        """Ends an interval and returns its milliseconds; raises RuntimeError if it is not running."""
        return self._finish(name).elapsed_ms

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as an interval; nothing waits for it."""
        self.start(name)
        running = self._running
        try:
            yield
        finally:
            if self._running is running:  # else a `reset` inside has forgotten it
                self._finish(name)

    def reset(self) -> None:
        """Forgets all times and running intervals."""
        self._running: dict[str, CUDATimer] = {}
        self._unread: dict[str, deque[CUDATimer]] = {}
        self._total_ms: dict[str, float] = {}

    def elapsed_ms(self, name: str) -> float:
        """Returns the sum of a name's intervals; raises KeyError if none has ended."""
        if name not in self._total_ms:
            known = ", ".join(map(repr, self._total_ms)) or "none"
            raise KeyError(f"CUDATimerCollection.elapsed_ms: no finished interval of {name!r}; there are: {known}")
        while self._unread[name]:
            self._read_oldest(name)
        return self._total_ms[name]

    def summary(self) -> dict[str, float]:
        """Returns milliseconds by name, in the order in which the names first ended."""
        return {name: self.elapsed_ms(name) for name in self._total_ms}

    @property
    def names(self) -> list[str]:
        """The names of finished intervals."""
        return list(self._total_ms)

    def _finish(self, name: str) -> CUDATimer:
        timer = self._running.pop(name, None)
        if timer is None:
            raise RuntimeError(f"CUDATimerCollection.stop: {name!r} is not running; start it first")
        timer.__exit__()
        self._total_ms.setdefault(name, 0.0)
        unread = self._unread.setdefault(name, deque())
        unread.append(timer)
        if len(unread) > _MOST_UNREAD:
            self._read_oldest(name)
        return timer

    def _read_oldest(self, name: str) -> None:
        self._total_ms[name] += self._unread[name].popleft().elapsed_ms

    def __repr__(self) -> str:
        width = max(map(len, self.names), default=0)
        lines = [f"  {name:<{width}} : {elapsed_ms:8.3f} ms" for name, elapsed_ms in self.summary().items()]
        return "\n".join(["CUDATimerCollection:", *(lines or ["  nothing timed"])])


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
