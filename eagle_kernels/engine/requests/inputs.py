"""Reading of prompts, seeds and limits that a caller passes as Python's own types, torch tensors or NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.values import are_integers, is_integer, plain, shown
from ..models.tokenizer import Tokenizer

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]
Seeds = int | Sequence[int] | Tensor | None


def read_prompts(input_ids: Prompts, name: str = "generate: input_ids") -> tuple[list[list[int]], bool]:
    """Returns prompts as lists, at least one, and whether a single one came without a batch axis."""
    rows = plain(input_ids)
    if not isinstance(rows, list):
        raise ValueError(f"{name} must be integer ids [L] or [B, L], got {shown(rows)}; a tokenizer encodes text")
    is_single = bool(rows) and not any(isinstance(row, list) for row in rows)
    prompts = [rows] if is_single else rows
    if not prompts:
        raise ValueError(f"{name} must hold at least one prompt, got []")
    for index, prompt in enumerate(prompts):
        if are_integers(prompt):
            continue
        others = [token for token in prompt if not is_integer(token)] if isinstance(prompt, list) else [prompt]
        if others:
            held = shown(others[0])
            raise ValueError(f"{name} must be integer ids [L] or [B, L], but prompt {index} holds {held}")
    return prompts, is_single


def read_prompt(token_ids: Sequence[int] | Tensor, name: str) -> list[int]:
    """Returns one prompt as a list, which may be empty."""
    rows = plain(token_ids)
    prompts, is_single = ([rows], True) if rows == [] else read_prompts(rows, name)
    if not is_single:
        raise ValueError(f"{name} must be one prompt, [L] token ids, got a batch of {len(prompts)}")
    return prompts[0]


def encode_texts(texts: str | Sequence[str], tokenizer: Tokenizer) -> list[int] | list[list[int]]:
    """Returns the token ids of one text, or of each of several."""
    several = [texts] if isinstance(texts, str) else texts
    if not (isinstance(several, Sequence) and all(isinstance(text, str) for text in several)):
        raise ValueError(f"stream_text: text must be a string or a list of strings, got {shown(texts)}")
    prompts = [tokenizer.encode(text) for text in several]
    if not all(prompts):
        raise ValueError(f"stream_text: text must hold at least one token, got {several[prompts.index([])]!r}")
    return prompts[0] if isinstance(texts, str) else prompts


def read_seeds(seeds: Seeds, count: int, caller: str = "generate", num_samples: int = 1) -> list[int]:
    """Returns num_samples seeds per prompt, from its own upwards; fresh ones from torch's generator for None."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (count * num_samples,)).tolist()
    seeds = plain(seeds)
    seeds = seeds if isinstance(seeds, list) else [seeds] * count
    for seed in seeds:
        if not is_integer(seed):
            raise ValueError(f"{caller}: seeds must be ints, got {shown(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"{caller}: seeds must fit in 64 bits, got {seed}")
    if len(seeds) != count:
        raise ValueError(f"{caller}: seeds must be one for all or one per prompt, got {len(seeds)} for {count} prompts")
    return [(seed + sample + 2**63) % 2**64 - 2**63 for seed in seeds for sample in range(num_samples)]


def read_max_new_tokens(max_new_tokens: int, caller: str = "generate") -> int:
    """Returns the limit, a positive int."""
    max_new_tokens = plain(max_new_tokens)
    if not is_integer(max_new_tokens):
        raise ValueError(f"{caller}: max_new_tokens must be an int, got {shown(max_new_tokens)}")
    if max_new_tokens < 1:
        raise ValueError(f"{caller}: max_new_tokens must be at least 1, got {max_new_tokens}")
    return max_new_tokens
