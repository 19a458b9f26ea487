"""Reading of prompts, seeds and limits that a caller passes as Python's own types, torch tensors or NumPy arrays."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.validated import IN_64_BITS, at_least
from ...runtime.values import are_integers, is_integer, plain, scalar, shown
from ..models.tokenizer import Tokenizer
from .sampling_params import SamplingParams, are_params, read_params

OnePrompt = str | Sequence[int]
SeveralPrompts = Sequence[str] | Sequence[Sequence[int]]
Prompts = Tensor | OnePrompt | SeveralPrompts | Mapping[str, Any]
Seeds = int | Sequence[int] | Tensor | None
# all that requests ask for, of all prompts or of each; or how many tokens alone
Params = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None
Asked = int | SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]]
# of one call: their objects take a few kilobytes each
MOST_REQUESTS = 2**20
# of an engine: its tokenizer, for what needs one
TokenizerFor = Callable[[str], Tokenizer]


def read_prompts(
    input_ids: Prompts, name: str = "generate: input_ids", tokenizer_for: TokenizerFor | None = None
) -> tuple[list[list[int]], bool]:
    """Returns prompts as lists of ids, at least one, and whether a single one came without a batch axis."""
    rows, rule = plain(_ids_of(input_ids, name)), f"{name} must be text, integer ids [L] or [B, L]"
    if _are_texts(rows) and tokenizer_for is not None and not isinstance(input_ids, Mapping):
        caller, _, argument = name.partition(": ")
        rows = _encode(rows, tokenizer_for(f"text as {argument} of {caller} needs"), name)
    if not isinstance(rows, list):
        raise ValueError(f"{rule} or a list of texts, got {shown(input_ids)}")
    is_single = bool(rows) and not any(isinstance(row, list) for row in rows)
    prompts = [rows] if is_single else rows
    if not prompts:
        raise ValueError(f"{name} must hold at least one prompt, got []")
    for index, prompt in enumerate(prompts):
        if are_integers(prompt):
            continue
        others = [token for token in prompt if not is_integer(token)] if isinstance(prompt, list) else [prompt]
        if others:
            raise ValueError(f"{rule} or a list of texts, but prompt {index} holds {shown(others[0])}")
    return prompts, is_single


def read_prompt(token_ids: Prompts, name: str, tokenizer_for: TokenizerFor | None = None) -> list[int]:
    """Returns one prompt as a list, which may be empty."""
    rows = plain(_ids_of(token_ids, name))
    if isinstance(token_ids, Mapping):
        tokenizer_for = None
        if isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], list):
            rows = rows[0]
    if rows == []:
        return rows
    prompts, is_single = read_prompts(rows, name, tokenizer_for)
    if not is_single:
        raise ValueError(f"{name} must be one prompt, a text or [L] token ids, got a batch of {len(prompts)}")
    return prompts[0]


def _ids_of(value: Any, name: str) -> Any:
    """Returns the `input_ids` of what a tokenizer of transformers made, without padding; anything else as it is."""
    if not (isinstance(value, Mapping) and "input_ids" in value):
        return value
    ids, mask = plain(value["input_ids"]), plain(value.get("attention_mask"))
    if mask is None or not isinstance(ids, list) or not ids:
        return ids
    is_single = not isinstance(ids[0], list)
    rows, masks = ([ids], [mask]) if is_single else (ids, mask)
    if not all(isinstance(row, list) for row in rows):
        return ids  # which is refused
    is_mask = isinstance(masks, list) and all(isinstance(row, list) for row in masks)
    if not (is_mask and list(map(len, rows)) == list(map(len, masks))):
        raise ValueError(f"{name}: attention_mask must have the shape of input_ids")
    rows = [[token for token, is_kept in zip(*each) if is_kept] for each in zip(rows, masks)]
    return rows[0] if is_single else rows


def _encode(texts: str | list[str], tokenizer: Tokenizer, name: str) -> list[int] | list[list[int]]:
    """Returns the token ids of one text, or of each of several."""
    many = [texts] if isinstance(texts, str) else texts
    prompts = [tokenizer.encode(text) for text in many]
    if not all(prompts):
        raise ValueError(f"{name} must hold at least one token, got {shown(many[prompts.index([])])}")
    return prompts[0] if isinstance(texts, str) else prompts


def _are_texts(value: object) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return isinstance(value, str) or is_list and all(isinstance(text, str) for text in value)


def read_seeds(seeds: Seeds, count: int, caller: str = "generate", num_samples: int = 1) -> list[int]:
    """Returns num_samples seeds per prompt, from its own upwards; fresh ones from torch's generator for None."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (count * num_samples,), device="cpu").tolist()
    seeds = plain(seeds)
    seeds = seeds if isinstance(seeds, list) else [seeds] * count
    for seed, (rule, holds) in itertools.product(seeds, (("be ints", is_integer), IN_64_BITS)):
        if not holds(seed):
            raise ValueError(f"{caller}: seeds must {rule}, got {shown(seed)}")
    if len(seeds) != count:
        raise ValueError(f"{caller}: seeds must be one for all or one per prompt, got {len(seeds)} for {count} prompts")
    return [(seed + sample + 2**63) % 2**64 - 2**63 for seed in seeds for sample in range(num_samples)]


class Unset(int):
    """Marks a number that nobody gave."""


# The limit of a call that names none. Where sampling_params say another one, this one was not asked for.
DEFAULT_TOKENS: int = Unset(128)
# the seed of a call that names none
DEFAULT_SEED: int = Unset(0)


def read_samples(n: Any, count: int, caller: str) -> int:
    """Returns the number of samples of each of `count` prompts: a positive int, so that all requests fit in memory."""
    n = scalar(n)
    if not (is_integer(n) and n >= 1):
        raise ValueError(f"{caller}: n must be an int of at least 1, got {shown(n)}")
    if count > MOST_REQUESTS:
        raise ValueError(f"{caller}: input_ids must hold at most {MOST_REQUESTS} prompts, got {count}")
    if n * count > MOST_REQUESTS:
        rule = f"n must be at most {MOST_REQUESTS // count} for {count} prompts"
        raise ValueError(f"{caller}: {rule}, {MOST_REQUESTS} requests in all, got {shown(n)}")
    return n


def read_max_new_tokens(max_new_tokens: int, caller: str = "generate") -> int:
    """Returns the limit, a positive int."""
    max_new_tokens = scalar(max_new_tokens)
    for rule, holds in (("be an int", is_integer), at_least(1), IN_64_BITS):
        if not holds(max_new_tokens):
            raise ValueError(f"{caller}: max_new_tokens must {rule}, got {shown(max_new_tokens)}")
    return int(max_new_tokens)


def read_call_params(
    caller: str, max_new_tokens: Any, sampling_params: Any, count: int, others: Iterable[str]
) -> list[SamplingParams] | None:
    """Returns the params of each of `count` prompts, which may be in the place of max_new_tokens; None: there are none.
    others: The fields of sampling that the call names by themselves."""
    is_in_place = are_params(max_new_tokens)
    if sampling_params is None and not is_in_place:
        return None
    if is_in_place and sampling_params is not None:
        raise ValueError(f"{caller}: sampling_params must be absent when max_new_tokens already holds them")
    if others:
        raise ValueError(f"{caller}: {min(others)} must be set in the given params, not beside them")
    given, name = (max_new_tokens if is_in_place else sampling_params), f"{caller}: sampling_params"
    many = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(many) != count:
        raise ValueError(f"{name} must be one for all or one per prompt, got {len(many)} for {count} prompts")
    params = [read_params(each, name) for each in many]
    is_limited = not is_in_place and not isinstance(max_new_tokens, Unset)
    if is_limited and any(each.max_new_tokens != read_max_new_tokens(max_new_tokens, caller) for each in params):
        raise ValueError(f"{caller}: max_new_tokens must be that of the given params, got {shown(max_new_tokens)}")
    return params
