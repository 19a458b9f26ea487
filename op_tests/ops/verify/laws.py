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


def text_law(law: dict[tuple, torch.Tensor], length: int) -> dict[tuple, float]:
    """The probability of every text of `length` tokens."""
    return completed({(): 1.0}, law, length)


def completed(emitted: dict[tuple, float], law: dict[tuple, torch.Tensor], length: int) -> dict[tuple, float]:
    """The law of texts of `length` tokens that begin as `emitted` and go on as plain sampling from `law`."""
    whole: dict[tuple, float] = {}
    for text, probability in emitted.items():
        if len(text) < length:
            ways = {(*text, token): probability * float(prob) for token, prob in enumerate(law[text])}
            ways = completed(ways, law, length)
        else:
            ways = {text[:length]: probability}
        for way, share in ways.items():
            whole[way] = whole.get(way, 0.0) + share
    return whole


class EnumeratedDraws:
    """Stands in for a reference's `Draws`: what it hands out comes from a source that enumerates all outcomes.

    No two draws of one request may have the same key, in whatever rounds, or what is random in one would be known from
    the other.
    """

    def __init__(self, source):
        self._source, self._keys = source, set()

    def uniform(self, position, draw=0):
        self._use(("accept", position, draw))
        return self._source.uniform()

    def choose(self, weights, position):
        self._use(("residual", position))
        return self._source.choose(weights / weights.sum())

    def _use(self, key):
        assert key not in self._keys, f"the draw {key} is used twice"
        self._keys.add(key)


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
