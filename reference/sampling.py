"""Sampling one token a row: temperature, top-k, top-p, min-p and Gumbel noise, as the kernels of the package do it."""

from __future__ import annotations

import torch

from . import random

GREEDY_BELOW = 1e-5


def draw_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens int64 [R] drawn from logits [R, V]; temperatures below 1e-5 take the argmax (ties: the lowest id)."""
    scaled = scaled_logits(logits, temperature)
    noise = random.gumbel(seeds, positions, logits.shape[1])
    is_sampled = (temperature >= GREEDY_BELOW)[:, None]
    keys = torch.where(is_sampled, filtered_logits(scaled, top_k, top_p, min_p) + noise, scaled)
    best = keys.max(dim=1, keepdim=True).values
    # torch.max promises no tie rule, the first index of the largest value is ours
    tokens = torch.arange(logits.shape[1], device=logits.device).expand_as(keys)
    lowest = torch.where(keys == best, tokens, logits.shape[1]).min(dim=1).values
    return torch.where(best[:, 0] == float("-inf"), 0, lowest)


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp32 logits / temperature (unscaled where greedy), NaN as -inf."""
    inverse = torch.where(temperature >= GREEDY_BELOW, 1.0 / temperature, 1.0)
    scaled = logits.to(torch.float32) * inverse[:, None]
    return torch.where(scaled.isnan(), float("-inf"), scaled)


def filtered_logits(
    scaled: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """-inf where a filter removes the token; top-p works on what top-k left, renormalised. Ties at an edge all stay.

    top_k <= 0 or >= V, top_p >= 1 and min_p <= 0 remove nothing.
    """
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
        ordered_weight = torch.where(keep, weight, 0.0).sort(dim=1, descending=True, stable=True).values.double()
        mass = ordered_weight.cumsum(1)
        wanted = (mass[:, -1:] * top_p.double()[:, None]).clamp(min=torch.finfo(torch.float32).tiny)
        last = (mass < wanted).sum(dim=1, keepdim=True).clamp(max=num_tokens - 1)
        edge = torch.where((top_p < 1)[:, None], ordered.gather(1, last), float("-inf"))
        keep &= scaled >= edge
    if min_p is not None:
        keep &= ~(min_p > 0)[:, None] | (weight >= min_p.clamp(max=1.0)[:, None])
    return torch.where(keep, scaled, float("-inf"))
