"""Sampling rows of logits: penalties, bias, grammar, temperature, top-k, top-p, min-p and Gumbel noise, in this order.

Computes in float64 where logits are float64, else in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import random

GREEDY_BELOW = 1e-5
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class Processors(NamedTuple):
    """What changes logits before they are sampled, one row of each per row of logits; None: not at all.
    prompt_mask and token_bitmask are int32 words: bit v % 32 of word v // 32 belongs to token v."""

    repetition_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    logit_bias: torch.Tensor | None = None
    token_bitmask: torch.Tensor | None = None

    @property
    def has_penalties(self) -> bool:
        return any(value is not None for value in self[:3])

    def rows(self, index) -> Processors:
        return Processors(*(None if value is None else value[index] for value in self))


class Filters(NamedTuple):
    """Which tokens of a row may be drawn; off at top_k <= 0 or >= V, top_p >= 1, min_p <= 0, or None."""

    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    filter_order: str = "top_k_first"

    def rows(self, index) -> Filters:
        return Filters(*(None if value is None else value[index] for value in self[:3]), self.filter_order)


NO_PROCESSORS = Processors()
NO_FILTERS = Filters()


def processed_logits(logits: torch.Tensor, processors: Processors) -> torch.Tensor:
    """Returns logits [R, V] after penalties, bias and grammar."""
    num_tokens = logits.shape[1]
    logits = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if processors.has_penalties:
        zeros = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
        counts = zeros if processors.output_counts is None else processors.output_counts.to(torch.int64)
        is_seen = counts > 0
        if processors.prompt_mask is not None:
            is_seen = is_seen | token_bits(processors.prompt_mask, num_tokens)
        if processors.repetition_penalty is not None:
            penalty = processors.repetition_penalty[:, None]
            repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(is_seen, repeated, logits)
        if processors.frequency_penalty is not None:
            # rounded once, as a fused multiply-add does
            penalty = processors.frequency_penalty.to(torch.float64)[:, None] * counts
            logits = (logits.to(torch.float64) - penalty).to(logits.dtype)
        if processors.presence_penalty is not None:
            logits = logits - torch.where(counts > 0, processors.presence_penalty[:, None], 0.0)
    if processors.logit_bias is not None:
        logits = logits + processors.logit_bias
    if processors.token_bitmask is not None:
        logits = torch.where(token_bits(processors.token_bitmask, num_tokens), logits, float("-inf"))
    return logits


def token_bits(words: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns truth values [R, num_tokens] of int32 words [R, ceil(num_tokens / 32)]."""
    token = torch.arange(num_tokens, device=words.device)
    return (words.to(torch.int64)[:, token // 32] >> (token % 32)) & 1 == 1


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns logits / temperature (unscaled where greedy), NaN as -inf, +inf as the largest finite fp32.
    1 / temperature is never 0, so that +inf stays above all other logits."""
    wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    inverse = torch.where(temperature >= GREEDY_BELOW, (1.0 / temperature).clamp(min=SMALLEST_NORMAL), 1.0)
    scaled = wide * inverse[:, None]
    return torch.where(scaled.isnan(), float("-inf"), scaled).clamp(max=torch.finfo(torch.float32).max)


def filtered_logits(
    scaled: torch.Tensor, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, filter_order: str = "top_k_first",
) -> torch.Tensor:  # fmt: skip
    """Returns `scaled` with -inf where a filter removes the token; ties at an edge all stay.
    filter_order: "top_k_first": top-p works on what top-k left, renormalised; "joint": both work on all tokens."""
    num_tokens = scaled.shape[1]
    ordered = scaled.sort(dim=1, descending=True, stable=True).values
    maximum = ordered[:, :1]
    weight = torch.where(scaled == maximum, 1.0, torch.exp(scaled - maximum))
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if top_k is not None:
        is_on = (top_k > 0) & (top_k < num_tokens)
        last = torch.where(is_on, top_k, num_tokens).to(torch.int64) - 1
        keep &= scaled >= ordered.gather(1, last[:, None])
    if top_p is not None:
        base = torch.where(keep, weight, 0.0) if filter_order == "top_k_first" else weight
        mass = base.sort(dim=1, descending=True, stable=True).values.double().cumsum(1)
        wanted = (mass[:, -1:] * top_p.double()[:, None]).clamp(min=SMALLEST_NORMAL)
        last = (mass < wanted).sum(dim=1, keepdim=True).clamp(max=num_tokens - 1)
        edge = torch.where((top_p < 1)[:, None], ordered.gather(1, last), float("-inf"))
        keep &= scaled >= edge
    if min_p is not None:
        keep &= ~(min_p > 0)[:, None] | (weight >= min_p.clamp(max=1.0)[:, None])
    return torch.where(keep, scaled, float("-inf"))


def kept_logits(
    logits: torch.Tensor, temperature: torch.Tensor, filters: Filters = NO_FILTERS,
    processors: Processors = NO_PROCESSORS,
) -> torch.Tensor:  # fmt: skip
    """Returns what tokens are drawn from: processed, scaled logits, -inf where filtered; greedy rows are not."""
    scaled = scaled_logits(processed_logits(logits, processors), temperature)
    is_sampled = (temperature >= GREEDY_BELOW)[:, None]
    return torch.where(is_sampled, filtered_logits(scaled, *filters), scaled)


def draw_tokens(
    logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor,
    filters: Filters = NO_FILTERS, processors: Processors = NO_PROCESSORS,
) -> torch.Tensor:  # fmt: skip
    """Returns tokens int64 [R] drawn from logits [R, V], below temperature 1e-5 the argmax (ties: the lowest id)."""
    kept = kept_logits(logits, temperature, filters, processors)
    noise, fine = random.grouped_gumbel(seeds, positions, logits.shape[1])
    is_sampled = (temperature >= GREEDY_BELOW)[:, None]
    drawn = random.largest(torch.where(is_sampled, kept + noise, kept), torch.where(is_sampled, fine, random.NO_NOISE))
    return torch.where(kept.max(dim=1).values == float("-inf"), 0, drawn)


def log_probabilities(kept: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log softmax fp32 [R] of `kept` logits [R, V] at `tokens` [R], -inf for a row of nothing but -inf."""
    wide = kept.to(torch.float64)
    logprob = wide.gather(1, tokens.to(torch.int64)[:, None])[:, 0] - wide.logsumexp(1)
    return torch.where(logprob.isnan(), float("-inf"), logprob).to(torch.float32)
