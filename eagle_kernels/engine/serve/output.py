"""Results of generation: tokens and statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, overload

# torch brings this package; Python 3.10 itself has no named tuples that are generic
from typing_extensions import NamedTuple, TypeVar

from ..requests.sampling_params import SCORES

One = TypeVar("One")
# the form of the tokens, which type checkers know of most calls
Ids = TypeVar("Ids", covariant=True, default=list[int] | list[list[int]])


@dataclass
class GenerationStats:
    """Holds the counts and times of one `generate` call; `stats["name"]` reads fields and properties alike.

    A *step* is one verification of one request, so a batch of 3 takes 3 steps at once. The first new token comes from
    the prefill and belongs to no step. Acceptance counts what verification accepted, even past the end of the text.

    Attributes:
        num_requests: Its prompts, or the samples of them.
        num_steps, num_draft_tokens: Levels and nodes of the tree, or of the largest of several.
        seeds: The requests' seeds, including those that the engine chose.
        prompt_tokens, generated_tokens: Tokens of all prompts, and new tokens of all requests.
        shared_tokens: Prompt tokens not read again, since an earlier prompt began with the same ones.
        steps: Steps of all requests.
        batch_steps: Steps of the batch.
        levels: Drafts that the steps could have accepted: for each, the levels of its tree, or its drafts if fewer; 0
            for a plain step.
        drafted: Drafts verified; steps * (num_draft_tokens - 1) if the tree stays the same.
        accepted: Drafts accepted.
        accepted_per_depth: [num_steps]. Steps in which the draft at depth 1, 2, ... was accepted.
        finish_reasons: One per request, as in `Request`.
        prefill_time_s, decode_time_s: Wall time for reading the prompts, and for the steps after that.
        cold_steps, cold_time_s: Of these, the steps that compiled or captured something, and their time.
        phase_time_ms: Device time of draft, verify, sample and bookkeeping.
        plain_step_ms: Time of a plain step with this number of requests: the mean of the latest call with
            speculative=False, or else, once `speedup` has been read, the device's time for a step after the prompts of
            the first `generate` with drafts. None without either, if other requests ran beside that call, or if it
            failed.
    """

    num_requests: int
    num_steps: int
    num_draft_tokens: int
    seeds: list[int]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    steps: int = 0
    batch_steps: int = 0
    levels: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    cold_steps: int = 0
    cold_time_s: float = 0.0
    phase_time_ms: dict[str, float] = field(default_factory=dict)
    plain_step_ms: float | None = None
    # of the engine, which statistics do not hold; no field, since copies have none
    _time_plain_step: ClassVar[weakref.WeakMethod[Callable[[int], float | None]] | None] = None

    def measured_by(self, time_plain_step: Callable[[int], float | None]) -> GenerationStats:
        """Lets `speedup` time a plain step by a method that takes the number of requests; returns the statistics."""
        self._time_plain_step = weakref.WeakMethod(time_plain_step)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_time_plain_step"}

    @property
    def mean_accept_length(self) -> float:
        """Mean tokens per step: 1 (the target's own token) plus the accepted drafts."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts as a share of those that the steps could have accepted."""
        return self.accepted / self.levels if self.levels else 0.0

    @property
    def draft_efficiency(self) -> float:
        """Accepted drafts as a share of those that were verified."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def step_ms(self) -> float | None:
        """Mean wall time of a step of the batch; None without steps."""
        return 1e3 * self.decode_time_s / self.batch_steps if self.batch_steps else None

    @property
    def warm_step_ms(self) -> float | None:
        """The same without steps that compiled or captured something; with them if there are no others."""
        num_warm = self.batch_steps - self.cold_steps
        return 1e3 * (self.decode_time_s - self.cold_time_s) / num_warm if num_warm > 0 else self.step_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per second after the prefill, not counting those from the prefill."""
        decoded = self.generated_tokens - self.num_requests
        return decoded / self.decode_time_s if self.decode_time_s else 0.0

    @property
    def speedup(self) -> float | None:
        """Speedup over plain decoding, mean_accept_length * plain_step_ms / warm_step_ms; None if unknown.

        After a `generate` with drafts, reading this for the first time times a plain step, unless requests are running.
        """
        if not self.batch_steps:
            return None
        if self.plain_step_ms is None and self._time_plain_step is not None:
            time_ms = self._time_plain_step()
            self.plain_step_ms = None if time_ms is None else time_ms(self.num_requests)
        if self.plain_step_ms is None:
            return None
        return self.mean_accept_length * self.plain_step_ms / self.warm_step_ms

    def __getitem__(self, name: str) -> object:
        if name not in names_of(self):
            raise KeyError(name)
        return getattr(self, name)

    def to_dict(self) -> dict[str, object]:
        """Returns fields and properties, ready for JSON."""
        return fields_and_properties(self)


class _TokensAndStats(NamedTuple, Generic[Ids]):
    output_ids: Ids
    stats: GenerationStats


class Scores(Generic[One]):
    """Types an attribute that, like the tokens, is one request's value or a list of them."""

    @overload
    def __get__(self, output: GenerationOutput[list[int]], owner: object) -> One | None: ...
    @overload
    def __get__(self, output: GenerationOutput[list[list[int]]], owner: object) -> list[One | None] | None: ...
    @overload
    def __get__(self, output: GenerationOutput, owner: object) -> One | list[One | None] | None: ...


class GenerationOutput(_TokensAndStats[Ids]):
    """Holds what `generate` returns: `output_ids, stats = engine.generate(...)`.

    Attributes:
        output_ids: The new tokens of one prompt, or of each of several.
        stats: Counts and times.
        logprobs, top_logprobs, prompt_logprobs, prompt_top_logprobs: As in `Request`, in the form of output_ids; None
            where `SamplingParams` does not ask for them. They are not unpacked: `engine.generate(...).logprobs`.
    """

    logprobs: Scores[list[float]] = None
    top_logprobs: Scores[list[list[tuple[int, float]]]] = None
    prompt_logprobs: Scores[list[float | None]] = None
    prompt_top_logprobs: Scores[list[list[tuple[int, float]] | None]] = None

    def with_scores(self, scores: dict[str, Any]) -> GenerationOutput[Ids]:
        """Sets the log-probabilities in `scores`, by name; returns the output."""
        vars(self).update(scores)
        return self

    def __repr__(self) -> str:
        stats = self.stats
        counts = f"num_requests={stats.num_requests}, generated_tokens={stats.generated_tokens}"
        scores = {f".{name}": getattr(self, name) for name in SCORES if getattr(self, name) is not None}
        told = "".join(f", {name}={_shortened(value)}" for name, value in scores.items())
        return f"GenerationOutput({counts}, mean_accept_length={stats.mean_accept_length:.2f}{told})"


def _shortened(value: Any, most: int = 3) -> str:
    """Shows the first values of a list, of lists in it fewer, and how many there are."""
    if isinstance(value, list):
        told = [_shortened(item, most - 1) for item in value[:most]]
        return f"[{', '.join(told)}, ... {len(value)} in all]" if len(value) > most else f"[{', '.join(told)}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shortened, value))})"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def names_of(record: object) -> list[str]:
    """Returns the names of a record's fields and properties."""
    properties = [name for name, value in vars(type(record)).items() if isinstance(value, property)]
    return [*(name for name in vars(record) if not name.startswith("_")), *properties]


def fields_and_properties(record: object) -> dict[str, object]:
    names = names_of(record)
    values = {name: getattr(record, name) for name in reversed(names)}  # properties first, which may fill in fields
    return {name: values[name] for name in names}


def record_of(kind: type[One], values: Mapping[str, Any]) -> One:
    """Makes a dataclass of what its `to_dict` gave, in which other members of its class are passed over."""
    known = {item.name: item for item in fields(kind)}
    missing = [name for name, item in known.items() if item.default is MISSING and name not in values]
    unknown = [name for name in values if name not in known and not hasattr(kind, name)]
    if missing or unknown:
        fault = f"{missing[0]} is missing" if missing else f"there is no field {unknown[0]}"
        raise ValueError(f"{kind.__name__}.from_dict: {fault}")
    return kind(**{name: value for name, value in values.items() if name in known})
