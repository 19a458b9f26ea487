"""Results of generation: tokens and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class GenerationStats:
    """Holds the counts and times of one `generate` call; `stats["name"]` reads fields and properties alike.

    A *step* is one verification of one request (a batch of 3 makes 3 steps at once); the token that follows the prompt
    comes from the prefill and belongs to no step. Acceptance counts what verification accepted, even if an end token
    or the token limit then cut the text short.

    levels              draft tokens that the steps could have accepted: for each step the levels of its tree, or its
                        number of drafts if that is smaller; 0 for a plain step
    drafted             draft tokens verified: steps * (num_draft_tokens - 1) if the tree stays the same
    accepted            draft tokens accepted
    accepted_per_depth  [num_steps] in how many steps the draft at depth 1, 2, ... was accepted
    finish_reasons      per request, as in `Request`
    seeds               per request, including those that the engine chose
    phase_time_ms       device time of draft / verify / sample / bookkeeping
    plain_step_ms       measured time of one plain decoding step at this batch size; None if none was measured
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
        """Returns the mean tokens per step: 1 (the target's own) + accepted drafts."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Returns the accepted drafts over the most that the steps could have accepted."""
        return self.accepted / self.levels if self.levels else 0.0

    @property
    def draft_efficiency(self) -> float:
        """Returns the accepted drafts over the verified drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def step_ms(self) -> float | None:
        """Returns the mean wall time of a step of the batch; None without steps."""
        return 1e3 * self.decode_time_s / self.batch_steps if self.batch_steps else None

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens of all requests over the time after the prefill, which brings the first token of each."""
        decoded = self.generated_tokens - self.num_requests
        return decoded / self.decode_time_s if self.decode_time_s else 0.0

    @property
    def speedup(self) -> float | None:
        """Returns mean_accept_length * plain_step_ms / step_ms, the speedup over plain decoding; None if unknown."""
        if self.plain_step_ms is None or not self.batch_steps:
            return None
        return self.mean_accept_length * self.plain_step_ms / self.step_ms

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns fields and properties, ready for JSON."""
        return fields_and_properties(self)


class _TokensAndStats(NamedTuple):
    output_ids: list[list[int]] | list[int]
    stats: GenerationStats


class GenerationOutput(_TokensAndStats):
    """Holds what `generate` returns: `output_ids, stats = engine.generate(...)`.

    output_ids  the new tokens: a list per request, or a single list for a single prompt
    logprobs    their log-probabilities in the same form; None unless `SamplingParams.logprobs` asks for them. They are
                not part of the unpacking
    """

    logprobs: list[list[float]] | list[float] | None = None


def fields_and_properties(record: Any) -> dict[str, Any]:
    properties = [name for name, value in vars(type(record)).items() if isinstance(value, property)]
    return {**vars(record), **{name: getattr(record, name) for name in properties}}
