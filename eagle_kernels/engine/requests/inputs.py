"""Reading of prompts, seeds and limits that a caller passes as Python's own types, torch tensors or NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.values import is_integer, shown

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]
Seeds = int | Sequence[int] | Tensor | None


def read_prompts(input_ids: Prompts, name: str = "generate: input_ids") -> tuple[list[list[int]], bool]:
    """Returns prompts as lists, and whether a single one came without a batch axis; an empty list holds none."""
    rows = _plain(input_ids)
    if not isinstance(rows, list):
        raise ValueError(f"{name} must be integer ids [L] or [B, L], got {shown(rows)}; a tokenizer makes them of text")
    is_single = bool(rows) and not any(isinstance(row, list) for row in rows)
    prompts = [rows] if is_single else rows
    for index, prompt in enumerate(prompts):
        others = [token for token in prompt if not is_integer(token)] if isinstance(prompt, list) else [prompt]
        if others:
            held = shown(others[0])
            raise ValueError(f"{name} must be integer ids [L] or [B, L], prompt {index} holds {held}")
    return prompts, is_single


def read_seeds(seeds: Seeds, count: int) -> list[int]:
    """Returns one seed per prompt; fresh ones from torch's generator for None."""
    if seeds is None:
        return torch.randint(-(2**63), 2**63 - 1, (count,)).tolist()
    seeds = _plain(seeds)
    seeds = seeds if isinstance(seeds, list) else [seeds] * count
    for seed in seeds:
        if not is_integer(seed):
            raise ValueError(f"generate: seeds must be ints, got {shown(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"generate: seeds must fit in 64 bits, got {seed}")
    if len(seeds) != count:
        raise ValueError(f"generate: seeds must be one for all or one per prompt, got {len(seeds)} for {count} prompts")
    return seeds


def read_max_new_tokens(max_new_tokens: int) -> int:
    """Returns the limit, a positive int."""
    max_new_tokens = _plain(max_new_tokens)
    if not is_integer(max_new_tokens):
        raise ValueError(f"generate: max_new_tokens must be an int, got {shown(max_new_tokens)}")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    return max_new_tokens


def read_flag(name: str, value: bool) -> bool:
    """Returns True or False; refuses 0, "no" and None."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def _plain(value: Any) -> Any:
    """Returns nested lists of Python numbers for sequences, tensors and arrays; leaves text as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value
