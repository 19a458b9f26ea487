"""Exact laws of verifiers whose drafts are sampled: random targets and drafts that remember the whole text so far."""

from __future__ import annotations

import itertools

import torch


def random_law(vocab_size: int, depth: int, *, sharpness: float = 1.5, zeros: int = 0) -> dict[tuple, torch.Tensor]:
    """The distribution float64 [V] of the next token after every text of at most `depth` tokens.

    zeros: how many tokens, at random, have probability 0.
    """
    law = {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            weights = torch.softmax(sharpness * torch.randn(vocab_size, dtype=torch.float64), dim=0)
            weights[torch.randperm(vocab_size)[:zeros]] = 0
            law[text] = weights / weights.sum()
    return law


def near(law: dict[tuple, torch.Tensor], share: float) -> dict[tuple, torch.Tensor]:
    """A draft that mixes the target with another law."""
    vocab_size = len(law[()])
    other = random_law(vocab_size, max(map(len, law)))
    return {text: share * law[text] + (1 - share) * other[text] for text in law}


def dyadic_probs(num_rows: int, vocab_size: int, grid: int = 64) -> torch.Tensor:
    """Random probabilities fp32 [num_rows, V] that are multiples of 1 / grid, some of them 0: their sums are exact."""
    probs = torch.zeros(num_rows, vocab_size)
    ones = torch.ones(num_rows, grid)
    favoured = torch.randint(vocab_size, (num_rows, 4)).gather(1, torch.randint(4, (num_rows, grid)))
    anywhere = torch.randint(vocab_size, (num_rows, grid))
    return probs.scatter_add_(1, torch.where(torch.rand(num_rows, grid) < 0.7, favoured, anywhere), ones) / grid


def draft_map(vocab_size: int, draft_vocab_size: int) -> torch.Tensor:
    """A random d2t [Vd]: target id - draft id, ascending in the target id as the heads have it."""
    kept = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    return kept - torch.arange(draft_vocab_size)
