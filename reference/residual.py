"""Target and draft distributions, and what a rejected draft leaves of them (see ops/rejection/shared).

Everything is computed in the precision of what is given: float32 from logits, float64 from float64 probabilities. What
is random comes from a `Draws`, in whose place a test can put an object that enumerates all outcomes.
"""

import torch

from . import random
from .sampling import GREEDY_BELOW, scaled_logits

LARGEST_PROB = 1.001


def probs_of_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns softmax(logits [R, V] / temperature [R]) in fp32; one-hot at the largest logit (lowest id) below 1e-5.
    NaN counts as -inf, +inf as the largest finite number. A row of nothing but -inf has no probability above 0, but
    that of token 0 where it is greedy."""
    if logits.numel() == 0:
        return logits.to(torch.float32)
    is_sampled = (temperature >= GREEDY_BELOW)[:, None]
    scaled = scaled_logits(logits.to(torch.float32), temperature)
    maximum = scaled.max(dim=1, keepdim=True).values
    weight = torch.exp(scaled - torch.where(maximum == float("-inf"), 0.0, maximum))
    total = weight.sum(dim=1, keepdim=True)
    probs = weight * (1.0 / torch.where(total > 0, total, 1.0))
    # torch.max promises no tie rule, the lowest id is ours
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    best = torch.where(scaled == maximum, ids, scaled.shape[1]).min(dim=1, keepdim=True).values
    return torch.where(is_sampled, probs, (ids == best).to(torch.float32))


def given_probs(probs: torch.Tensor) -> torch.Tensor:
    """Returns probabilities with 0 in place of what is none: NaN, negative, above 1.001."""
    return torch.where((probs > 0) & (probs <= LARGEST_PROB), probs, torch.zeros_like(probs))


def on_target_ids(draft_probs: torch.Tensor, d2t: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Returns draft probabilities [R, Vd] by target ids: [R, vocab_size or more], 0 where drafting cannot draw."""
    num_drafts = draft_probs.shape[1]
    ids = torch.arange(num_drafts, device=draft_probs.device)
    if d2t is not None:
        ids = ids + d2t
    width = vocab_size if d2t is not None else max(vocab_size, num_drafts)
    wide = draft_probs.new_zeros(len(draft_probs), width)
    is_target = (ids >= 0) & (ids < width)
    wide[:, ids[is_target]] = draft_probs[:, is_target]
    return wide


def widened(target_probs: torch.Tensor, width: int) -> torch.Tensor:
    """Returns target probabilities [R, V] with zeros up to `width` tokens."""
    return torch.nn.functional.pad(target_probs, (0, width - target_probs.shape[1]))


def subtract(target: torch.Tensor, draft: torch.Tensor, acceptance=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns norm((acceptance P - Q)+) and the sum that it was divided by; P itself where that is 0."""
    left = (acceptance * target - draft).clamp(min=0)
    mass = left.sum()
    return (left * (1.0 / mass) if mass > 0 else target), mass


def remove(draft: torch.Tensor, token: int) -> torch.Tensor:
    """Returns norm(Q without the token); zeros where nothing is left."""
    left = draft.clone()
    left[token] = 0
    mass = left.sum()
    return left * (1.0 / mass) if mass > 0 else torch.zeros_like(left)


def prob_at(probs: torch.Tensor, token: int) -> torch.Tensor:
    """Returns the probability of a token, 0 for one outside the vocabulary."""
    return probs[token] if 0 <= token < len(probs) else probs.new_zeros(())


def ratio(target_prob: torch.Tensor, draft_prob: torch.Tensor) -> float:
    """Returns P / Q in float64 for a token that drafting could draw; 0 for one that it could not."""
    return float(target_prob) / float(draft_prob) if draft_prob > 0 else 0.0


class Draws:
    """The random numbers of one request, by its seed and the position of the token that they are for."""

    def __init__(self, seed: int):
        self._seed = seed

    def uniform(self, position: int, draw: int = 0) -> float:
        """Returns the coin in [0, 1) of the draft at `position`; `draw` tells drafts of one position apart."""
        return (self._words(position, random.STREAM_ACCEPT, draw)[0] >> 8) * 2.0**-24

    def choose(self, weights: torch.Tensor, position: int) -> int:
        """Returns a token by its weight, which need not sum to 1, for `position`; 0 where no token has one."""
        words = self._words(position, random.STREAM_RESIDUAL, 0)
        key = [torch.tensor([word], dtype=torch.int64, device="cpu") for word in words]
        words = random.token_words(key, len(weights))
        keys = weights.cpu().to(torch.float32).log() + random.gumbel(words)
        return 0 if keys.max() == float("-inf") else int(random.largest(keys, random.fine_bits(words)))

    def _words(self, position: int, stream: int, draw: int) -> list[int]:
        """Returns random.random_block of one key, whose arithmetic works on plain integers, too."""
        return random.philox(self._seed, [position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF, stream, draw])
