"""What a request asks of its tokens, and which parts of verification that needs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from ...runtime.values import is_integer

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling of one request, and what ends it. Every value is checked here.

    temperature         0: greedy
    top_k, top_p, min_p filters, in this order; 0, 1.0 and 0.0 turn them off
    repetition_penalty  divides positive logits of tokens in prompt or output, multiplies negative ones; 1: off
    frequency_penalty   subtracted from a token's logit once per occurrence in the output; 0: off
    presence_penalty    subtracted from the logit of every token of the output; 0: off
    seed                64 bits; None: a fresh one, which `Request.seed` tells
    max_new_tokens      a request ends with exactly so many tokens, or with
    stop_token_ids      the first of these that it emits, or
    stop                the first token that completes one of these strings (needs the engine's tokenizer); the text
                        ends before the string, the tokens end with it
    logprobs            keep the log-probability of every token: True among those that the filters left, as it was
                        drawn (greedy: among all, at temperature 1); "raw" by the target's logits as they are, without
                        penalties, temperature and filters
    drafter             the method that drafts for this request, where the configuration has several; None: the first
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool | str = False
    drafter: str | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            # rows hold them in fp32
            is_number = (is_integer(value) or isinstance(value, float)) and -_LARGEST <= value <= _LARGEST
            self._require(is_number, name, "be a finite int or float")
        self._require(self.temperature >= 0, "temperature", "be at least 0")
        is_count = is_integer(self.top_k) and 0 <= self.top_k < 2**31
        self._require(is_count, "top_k", "be an int of at least 0 (0: off), below 2^31")
        self._require(0 < self.top_p <= 1, "top_p", "lie in (0, 1] (1: off)")
        self._require(0 <= self.min_p <= 1, "min_p", "lie in 0..1 (0: off)")
        self._require(self.repetition_penalty > 0, "repetition_penalty", "be above 0 (1: off)")
        is_seed = self.seed is None or (is_integer(self.seed) and -(2**63) <= self.seed < 2**63)
        self._require(is_seed, "seed", "be None or an int of 64 bits")
        is_count = is_integer(self.max_new_tokens) and self.max_new_tokens >= 1
        self._require(is_count, "max_new_tokens", "be an int of at least 1")
        for name, is_kind, kind in (
            ("stop_token_ids", is_integer, "token ids"),
            ("stop", lambda text: isinstance(text, str) and text != "", "strings that are not empty"),
        ):
            value = getattr(self, name)
            is_list = isinstance(value, (tuple, list, set, frozenset)) and all(map(is_kind, value))
            self._require(is_list, name, f"be a tuple of {kind}")
            object.__setattr__(self, name, tuple(value))
        self._require(self.drafter is None or isinstance(self.drafter, str), "drafter", "be None or a method's name")
        self._require(isinstance(self.logprobs, bool) or self.logprobs == "raw", "logprobs", "be True, False or 'raw'")

    @property
    def has_filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"SamplingParams: {name} must {rule}, got {getattr(self, name)!r}")


SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


class Features(NamedTuple):
    """The parts of verification that the requests of a step need; a graph is for one batch size and one of these."""

    sampling: bool = False
    filters: bool = False
    penalties: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, requests: list[SamplingParams]) -> Features:
        return cls(
            any(params.temperature > 0 for params in requests),
            any(params.has_filters for params in requests),
            any(params.has_penalties for params in requests),
            any(bool(params.logprobs) for params in requests),
        )

    @property
    def draws(self) -> bool:
        """Whether tokens come from `verify_tree_sampled`, which serves greedy rows too, not from the greedy walk."""
        return any(self)
