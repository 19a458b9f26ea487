"""How a request samples and ends, and which parts of verification that needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict

import torch

from ...runtime.validated import IN_64_BITS, Rule, Validated, at_least, checked, is_number
from ...runtime.values import is_int64, is_integer, several, shown, utf8_fault
from .names import takes_other_names

TOP_P_RULE: Rule = ("lie in (0, 1] (1: off)", lambda share: 0 < share <= 1)
MIN_P_RULE: Rule = ("lie in 0..1 (0: off)", lambda share: 0 <= share <= 1)
MOST_TOP_LOGPROBS = 20
# end tokens that min_new_tokens can keep back
MOST_ENDS = 64
_LARGEST = torch.finfo(torch.float32).max  # rows hold numbers in fp32
_FINITE: Rule = ("be a finite int or float", lambda value: is_number(value) and -_LARGEST <= value <= _LARGEST)


def _whole(rule: str, least: int, bound: float = math.inf) -> Rule:
    return rule, lambda value: is_integer(value) and least <= value < bound


@takes_other_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams(Validated):
    """Holds how one request samples and what ends it. A value that breaks its rule raises ValueError.

    Other engines' names for fields work, too, such as max_tokens (`requests/names.py`).

    Args:
        temperature: 0 decodes greedily.
        top_k, top_p, min_p: Filters, in this order; 0, 1.0 and 0.0, None, or top_k=-1 turn them off.
        repetition_penalty: Divides positive logits of tokens in the prompt or output, multiplies negative ones; 1: off.
        frequency_penalty: Subtracted from a token's logit for each time it occurs in the output; 0: off.
        presence_penalty: Subtracted once from the logit of every token in the output; 0: off.
        seed: A 64-bit int; None: a fresh one, see `Request.seed`.
        max_new_tokens: New tokens of the request, unless something else ends it first.
        min_new_tokens: End tokens and stop_token_ids, at most 64 in all, are not drawn until the request has this many
            new tokens; at most max_new_tokens. Stop strings still end it.
        stop_token_ids: The request ends with the first of these that it emits; one id or several.
        ignore_eos: Whether to go on after the configuration's end tokens; stop_token_ids still end the request.
        stop: The request ends with the token that completes this string, or one of these strings; the text leaves it
            out, the tokens include it. May contain special tokens, such as "<|im_end|>". Needs the engine's tokenizer.
        logprobs: Whether to keep each token's log-probability. True: among the tokens that the filters left, as it was
            drawn (greedy: among all, at temperature 1). "raw": before penalties, temperature and filters.
        top_logprobs: How many of the most likely tokens to keep at each position, with raw log-probabilities; 0..20.
        logprob_start_len: From this token on, the prompt's tokens have raw log-probabilities and top_logprobs, too;
            None: none do. Such a prompt is read between steps, not within them.
        drafter: The method that drafts for this request, if the configuration has several; None: the first.
    """

    temperature: float = checked(0.0, _FINITE, at_least(0))
    top_k: int = checked(0, _whole("be an int of at least 0 (0: off), below 2^31", 0, 2**31), off=(-1, None))
    top_p: float = checked(1.0, _FINITE, TOP_P_RULE, off=(None,))
    min_p: float = checked(0.0, _FINITE, MIN_P_RULE, off=(None,))
    repetition_penalty: float = checked(1.0, _FINITE, ("be above 0 (1: off)", lambda penalty: penalty > 0), off=(None,))
    frequency_penalty: float = checked(0.0, _FINITE, off=(None,))
    presence_penalty: float = checked(0.0, _FINITE, off=(None,))
    seed: int | None = checked(None, ("be None or an int of 64 bits", is_int64))
    max_new_tokens: int = checked(128, _whole("be an int of at least 1", 1), IN_64_BITS)
    min_new_tokens: int = checked(0, _whole("be an int of at least 0", 0), IN_64_BITS, off=(None,))
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = checked(False, ("be True or False", lambda flag: isinstance(flag, bool)))
    logprobs: bool | str = checked(
        False,
        ("be True, False or 'raw'; top_logprobs=N adds the N likeliest tokens",
         lambda kind: isinstance(kind, bool) or isinstance(kind, str) and kind == "raw"),
        off=(None,),
    )  # fmt: skip
    top_logprobs: int = checked(
        0, _whole(f"be an int in 0..{MOST_TOP_LOGPROBS}", 0, MOST_TOP_LOGPROBS + 1), off=(None,)
    )
    logprob_start_len: int | None = checked(None, _whole("be None or an int of at least 0", 0), IN_64_BITS, off=(-1,))
    drafter: str | None = checked(None, ("be None or a method's name", lambda name: isinstance(name, str)))

    def __post_init__(self) -> None:
        self._check_each_field()
        for name, is_kind, kind in (
            ("stop_token_ids", is_int64, "token ids"),
            ("stop", lambda text: isinstance(text, str) and text != "", "strings that are not empty"),
        ):
            value = several(getattr(self, name)) or ()
            self._require(all(map(is_kind, value)), name, f"be a tuple of {kind}")
            object.__setattr__(self, name, value)
        is_text = all(utf8_fault(text) is None for text in self.stop)
        self._require(is_text, "stop", "hold text that UTF-8 can represent, not half of a surrogate pair")
        rule = f"be at most max_new_tokens = {self.max_new_tokens}"
        self._require(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", rule)

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p has an effect; at temperature 0 none has."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def scores(self) -> list[str]:
        """The fields of a `Request` with the log-probabilities that are asked for."""
        from_prompt, has_top = self.logprob_start_len is not None, self.top_logprobs > 0
        asked = self.logprobs, has_top, from_prompt, from_prompt and has_top
        return [name for name, is_asked in zip(SCORES, asked) if is_asked]

    @property
    def has_penalties(self) -> bool:
        """Whether one of the three penalties has an effect."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class SamplingFields(TypedDict):
    """Types the fields that a configuration shares, for `SamplingParams(**config.sampling)`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


SCORES = ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs")
SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


def read_params(params: Any, name: str) -> SamplingParams:
    """Returns the params that a caller gives, as such or as a mapping of their fields."""
    if isinstance(params, Mapping):
        return SamplingParams(**{str(field): value for field, value in params.items()})
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{name} must be SamplingParams or a dict of its fields, got {shown(params)}")
    return params


def are_params(value: Any) -> bool:
    """Returns whether a value stands for params, or for several of them."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(are_params, value))
    return isinstance(value, (SamplingParams, Mapping))


class Features(NamedTuple):
    """Names the parts of verification that requests of a step need; a graph is for one batch size and one of these."""

    sampling: bool = False
    filters: bool = False
    penalties: bool = False
    logprobs: bool = False
    minimum: bool = False
    top: bool = False

    @classmethod
    def of(cls, requests: list[SamplingParams]) -> Features:
        return cls(
            any(params.temperature > 0 for params in requests), any(params.has_filters for params in requests),
            any(params.has_penalties for params in requests), any(bool(params.logprobs) for params in requests),
            any(params.min_new_tokens > 0 for params in requests), any(params.top_logprobs > 0 for params in requests),
        )  # fmt: skip

    @property
    def draws(self) -> bool:
        """Whether tokens come from `verify_tree_sampled`, which serves greedy rows too, not from the greedy walk."""
        return self.sampling or self.filters or self.penalties or self.logprobs
