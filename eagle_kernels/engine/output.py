"""What generation returns: tokens and the numbers about them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .timing import percentile, round_times_s

if TYPE_CHECKING:
    from .stream import TokenStream


class TokenEvent(NamedTuple):
    """One committed token of a stream: which request, which token, and whether an accepted draft had guessed it;
    logprob: where `SamplingParams.logprobs` asks for it."""

    request: int
    token_id: int
    is_draft: bool
    logprob: float | None = None


@dataclass
class GenerationStats:
    """Counts and times of one `generate` call; `stats["name"]` answers fields and properties alike.

    A *step* is one verification of one request (a batch of 3 makes 3 steps at once); the token that follows the prompt
    comes from the prefill and belongs to no step. Acceptance counts what verification accepted, also where an end token
    or the token limit then cut the text.

    levels              draft tokens that steps could accept: of each the levels of its own tree, or its drafts where
                        these are fewer; of a plain one 0
    drafted             draft tokens verified: of a tree that stays the same, steps * (num_draft_tokens - 1)
    accepted            draft tokens accepted
    accepted_per_depth  [num_steps] in how many steps the draft at depth 1, 2, ... was accepted
    finish_reasons      per request: as in `Request`
    seeds               per request, also those that the engine chose
    phase_time_ms       device time of draft / verify / sample / bookkeeping
    plain_step_ms       measured time of one plain decoding step at this batch size, None if none was measured
    """

    num_requests: int
    num_steps: int
    num_draft_tokens: int
    seeds: list[int]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    batch_steps: int = 0
    levels: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    phase_time_ms: dict[str, float] = field(default_factory=dict)
    plain_step_ms: float | None = None

    @property
    def mean_accept_length(self) -> float:
        """Tokens a step: 1 (the target's own) + accepted drafts."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over the most a step can accept."""
        return self.accepted / self.levels if self.levels else 0.0

    @property
    def draft_efficiency(self) -> float:
        """Accepted drafts over verified drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def step_ms(self) -> float | None:
        """Mean wall time of a batch step."""
        return 1e3 * self.decode_time_s / self.batch_steps if self.batch_steps else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests over the time after the prefill (which brings the first token of each)."""
        decoded = self.generated_tokens - self.num_requests
        return decoded / self.decode_time_s if self.decode_time_s else 0.0

    @property
    def speedup(self) -> float | None:
        """Over plain decoding, per step: mean_accept_length * plain_step_ms / step_ms; None if never measured."""
        if self.plain_step_ms is None or not self.batch_steps:
            return None
        return self.mean_accept_length * self.plain_step_ms / self.step_ms

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def to_dict(self) -> dict[str, Any]:
        """Fields and properties, ready for JSON."""
        return _fields_and_properties(self)


class _TokensAndStats(NamedTuple):
    output_ids: list[list[int]] | list[int]
    stats: GenerationStats


class GenerationOutput(_TokensAndStats):
    """`output_ids, stats = engine.generate(...)`: the new tokens (a list per request; one list for one prompt).

    logprobs    of these, likewise; None unless `SamplingParams.logprobs` asks for them. Not unpacked
    """

    logprobs: list[list[float]] | list[float] | None = None


class RequestTimes(NamedTuple):
    """first_s: when a request's first token came, by `time.perf_counter`; rounds: see `timing.round_times_s`."""

    first_s: float
    rounds: list[tuple[float, int]]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds of each token behind the first; what a round brings at once shares its time."""
        return [elapsed_s / count for elapsed_s, count in self.rounds for _ in range(count)]


def time_requests(stream: TokenStream) -> list[RequestTimes]:
    """Runs a stream to its end and notes when the tokens of each of its requests come."""
    arrivals: list[list[tuple[float, bool]]] = [[] for _ in stream.requests]
    for event in stream:
        arrivals[event.request].append((time.perf_counter(), event.is_draft))
    return [RequestTimes(first_s, round_times_s(first_s, others)) for (first_s, _), *others in arrivals]


@dataclass
class GenerationResult:
    """What one request brought and what it took, as measurements keep it: a JSON line, there and back.

    `GenerationResult.from_stream(engine.stream(prompt, 128))` measures one. Two kinds of latency are kept apart, so
    that those of plain and of speculative decoding compare: a token's, and a round's, which brings several.

    generated_ids           new tokens
    per_token_latencies     s, one for each of them: the first one's is time_to_first_token, what a round brings at once
                            shares its time. `inter_token_latencies` is without the first
    total_time              s on the wall, from the request to the end of the stream; not a sum of latencies
    peak_memory_mib         most that torch held on the GPU meanwhile, weights and pools included; None: not measured,
                            as on the CPU
    time_to_first_token     s
    and of speculative decoding, None of plain:
    acceptance_rate         accepted drafts over the most that the rounds could accept
    tokens_per_step         mean of the rounds: accepted drafts and the target's own token
    num_speculation_rounds  how many; the first token comes before them
    draft_time_total_ms, verify_time_total_ms, sampling_time_total_ms, bookkeeping_time_total_ms
                            device time, scaled to all rounds from those that were timed; None where none was
    per_round_latencies     s, one for each round
    accepted_per_depth      in how many rounds the draft at depth 1, 2, ... was accepted
    """

    generated_ids: list[int]
    per_token_latencies: list[float]
    total_time: float
    peak_memory_mib: float | None
    time_to_first_token: float
    acceptance_rate: float | None = None
    tokens_per_step: float | None = None
    num_speculation_rounds: int | None = None
    draft_time_total_ms: float | None = None
    verify_time_total_ms: float | None = None
    sampling_time_total_ms: float | None = None
    bookkeeping_time_total_ms: float | None = None
    per_round_latencies: list[float] | None = None
    accepted_per_depth: list[int] | None = None

    def __post_init__(self) -> None:
        num_latencies, num_tokens = len(self.per_token_latencies), len(self.generated_ids)
        if num_latencies != num_tokens:
            raise ValueError(
                f"GenerationResult: per_token_latencies must hold one for each of the {num_tokens} generated_ids "
                f"(those of rounds are per_round_latencies), got {num_latencies}"
            )
        num_rounds = self.num_speculation_rounds
        if None not in (num_rounds, self.per_round_latencies) and len(self.per_round_latencies) != num_rounds:
            raise ValueError(
                f"GenerationResult: per_round_latencies must hold one for each of num_speculation_rounds={num_rounds}, "
                f"got {len(self.per_round_latencies)}"
            )

    @classmethod
    def from_stream(cls, stream: TokenStream) -> GenerationResult:
        """Runs a stream of one request, which must not have begun, to its end and measures it.

        On a GPU torch's peak of memory is reset first. Batches are measured by `EAGLEInference.benchmark`.
        """
        if len(stream.requests) != 1:
            raise ValueError(f"GenerationResult.from_stream: takes a stream of 1 request, got {len(stream.requests)}")
        (request,), is_gpu = stream.requests, stream.device.type == "cuda"
        if request.output_ids or request.is_finished:
            raise ValueError(f"GenerationResult.from_stream: stream has begun, with {len(request.output_ids)} tokens")
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(stream.device)
        start_s = time.perf_counter()
        (times,) = time_requests(stream)
        total_s = time.perf_counter() - start_s
        peak = torch.cuda.max_memory_allocated(stream.device) / 2**20 if is_gpu else None
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
        """Over the whole time, prompt included; 0.0 of no time."""
        return self.num_tokens / self.total_time if self.total_time else 0.0

    @property
    def peak_memory_mb(self) -> float | None:
        """The peak in millions of bytes, as disks and some tools count."""
        return None if self.peak_memory_mib is None else self.peak_memory_mib * 2**20 / 1e6

    @property
    def is_speculative(self) -> bool:
        return self.acceptance_rate is not None

    @property
    def inter_token_latencies(self) -> list[float]:
        """s, of all tokens but the first."""
        return self.per_token_latencies[1:]

    @property
    def latency_p50(self) -> float | None:
        """s a token, the first one's included, as of p95 and p99; None without tokens."""
        return percentile(self.per_token_latencies, 50)

    @property
    def latency_p95(self) -> float | None:
        return percentile(self.per_token_latencies, 95)

    @property
    def latency_p99(self) -> float | None:
        return percentile(self.per_token_latencies, 99)

    @property
    def round_latency_p50(self) -> float | None:
        """s a round, as of p95 and p99; None where there was none."""
        return percentile(self.per_round_latencies or [], 50)

    @property
    def round_latency_p95(self) -> float | None:
        return percentile(self.per_round_latencies or [], 95)

    @property
    def round_latency_p99(self) -> float | None:
        return percentile(self.per_round_latencies or [], 99)

    def to_dict(self) -> dict[str, Any]:
        """Fields and properties, ready for JSON."""
        return _fields_and_properties(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationResult:
        """Of what `to_dict` made; properties are computed anew."""
        known = {item.name: item for item in fields(cls)}
        missing = [name for name, item in known.items() if item.default is MISSING and name not in values]
        unknown = [name for name in values if name not in known and not isinstance(getattr(cls, name, None), property)]
        if missing or unknown:
            fault = f"{missing[0]} is missing" if missing else f"there is no field {unknown[0]}"
            raise ValueError(f"GenerationResult.from_dict: {fault}")
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_json_line(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"

    def summary(self) -> str:
        """One line: AR or SD, tokens, speed, latency of a token, peak memory, acceptance and rounds if speculative."""
        shown = [f"{'SD' if self.is_speculative else 'AR':<3}", f"{self.num_tokens} tok"]
        shown.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.num_tokens:
            shown.append(f"p50={1e3 * self.latency_p50:.0f}ms p95={1e3 * self.latency_p95:.0f}ms")
        shown.append("mem=-" if self.peak_memory_mib is None else f"mem={self.peak_memory_mib:.0f}MiB")
        if self.is_speculative:
            rounds = "-" if self.num_speculation_rounds is None else self.num_speculation_rounds
            shown.append(f"accept={self.acceptance_rate:.2f} rounds={rounds}")
        return " | ".join(shown)


def _fields_and_properties(record: Any) -> dict[str, Any]:
    properties = [name for name, value in vars(type(record)).items() if isinstance(value, property)]
    return {**vars(record), **{name: getattr(record, name) for name in properties}}
