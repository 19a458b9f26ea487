"""The functions of AITER's `aiter.ops.speculative.spec_utils`, with its names and conventions (see `aiter.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops import sample_from_logits as _sample_from_logits
from ..ops import select_top_k_tokens as _select_top_k_tokens
from ..runtime import check

__all__ = [
    "calculate_acceptance_rate", "fast_topk_torch", "generate_token_bitmask", "next_power_of_2", "pad_to_alignment",
    "sample_from_logits", "select_top_k_tokens",
]  # fmt: skip


def arguments(function: str, **values: Any) -> check.Arguments:
    """Returns the checks of a function's arguments."""
    return check.Arguments(f"integrations.aiter.{function}", values)


def _size_along(args: check.Arguments, name: str) -> int:
    """Checks a tensor and its axis `dim`; returns its size there."""
    tensor = args.values[name]
    if not check.is_dense(tensor) or tensor.dim() == 0:
        got = list(tensor.shape) if check.is_dense(tensor) else type(tensor).__name__
        args.fail(name, "be a dense tensor of at least one axis", got, TypeError)
    return tensor.shape[args.integer("dim", -tensor.dim(), tensor.dim() - 1)]


def fast_topk_torch(
    scores: torch.Tensor, k: int, dim: int = -1, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest values along `dim` and their indices, always sorted, equal values by ascending index."""
    args = arguments("fast_topk_torch", scores=scores, k=k, dim=dim)
    args.integer("k", 0, _size_along(args, "scores"))
    values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def select_top_k_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k (up to 16) most likely tokens of each row of logits [B, V] or [B, n, V].
    The results are fp32 log-probabilities and token ids. AITER's docstring promises log-probabilities, its code returns
    logits; this keeps the promise. Rows that already are log-probabilities come back unchanged up to rounding."""
    level = _select_top_k_tokens(logits.reshape(-1, logits.shape[-1]), topk=k, level=0)
    shape = (*logits.shape[:-1], k)
    return level.scores.view(shape), level.tokens.view(shape)


def generate_token_bitmask(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns bool [B, vocab_size], True at the ids of token_ids [B, n]; ids outside the vocabulary are skipped.
    Another function packs a grammar's words over a whole tree: `eagle_kernels.generate_token_bitmask`."""
    args = arguments("generate_token_bitmask", token_ids=token_ids, vocab_size=vocab_size)
    args.tensor("token_ids", (None, None), check.INTEGER, contiguous=0)
    args.integer("vocab_size", 0)
    is_token = (token_ids >= 0) & (token_ids < vocab_size)
    bitmask = torch.zeros(token_ids.shape[0], vocab_size + 1, dtype=torch.bool, device=token_ids.device)
    bitmask.scatter_(1, torch.where(is_token, token_ids, vocab_size).long(), True)
    return bitmask[:, :vocab_size].contiguous()


def sample_from_logits(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None
) -> torch.Tensor:
    """Draws one token from each row of logits [B, V]; returns int64 [B]. Temperature 0 is greedy.
    Seeds come from torch's generator of the device. top_p keeps the token that crosses it (the usual nucleus), which
    AITER drops."""
    args = arguments("sample_from_logits", logits=logits, temperature=temperature, top_p=top_p, top_k=top_k)
    args.tensor("logits", (None, None), check.FLOAT, contiguous=1)
    args.number("temperature", 0)
    if top_p is not None:
        args.number("top_p")
    if top_k is not None:
        args.integer("top_k", -check.MAX_INT32)
    num_rows, device = logits.shape[0], logits.device

    def rows(value, dtype):
        return None if value is None else torch.full((num_rows,), value, dtype=dtype, device=device)

    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device)
    return _sample_from_logits(
        logits, rows(0, torch.int64), seeds,
        rows(temperature, torch.float32), rows(top_k, torch.int64), rows(top_p, torch.float32),
    )  # fmt: skip


def calculate_acceptance_rate(accept_lengths: torch.Tensor, num_draft_tokens: int) -> float:
    """Returns accepted over proposed drafts, 0 for none."""
    arguments("calculate_acceptance_rate", num_draft_tokens=num_draft_tokens).integer("num_draft_tokens", 0)
    proposed = num_draft_tokens * accept_lengths.numel()
    return int(accept_lengths.sum()) / proposed if proposed else 0.0


def pad_to_alignment(tensor: torch.Tensor, alignment: int, dim: int = 0, value: float = 0.0) -> torch.Tensor:
    """Returns the tensor with `value` appended along `dim` until its size is a multiple of `alignment`."""
    args = arguments("pad_to_alignment", tensor=tensor, alignment=alignment, dim=dim)
    args.integer("alignment", 1)
    _size_along(args, "tensor")
    missing = -tensor.shape[dim] % alignment
    if missing == 0:
        return tensor
    axes_after = tensor.dim() - 1 - dim % tensor.dim()
    return torch.nn.functional.pad(tensor, (0, 0) * axes_after + (0, missing), value=value)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, 1 for n <= 0."""
    n = arguments("next_power_of_2", n=n).integer("n", -math.inf, math.inf)
    return 1 << max(n - 1, 0).bit_length()
