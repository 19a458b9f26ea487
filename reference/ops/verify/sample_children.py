"""Reference of sample_children."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import random
from ...sampling import GREEDY_BELOW, scaled_logits


class Output(NamedTuple):
    tokens: torch.Tensor
    logprobs: torch.Tensor


def sample_children(
    draft_logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    nodes: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    num_children: int,
    replacement: bool = False,
) -> Output:
    """See eagle_kernels/ops/verify/sample_children.py."""
    num_rows, vocab_size = draft_logits.shape
    scaled = scaled_logits(draft_logits, temperature).clamp(max=torch.finfo(torch.float32).max)
    nodes = torch.zeros_like(positions) if nodes is None else nodes
    tokens = torch.full((num_rows, num_children), -1, dtype=torch.int64, device=draft_logits.device)
    if replacement:
        for child in range(num_children):
            keys = _keys(scaled, positions, seeds, temperature, nodes.to(torch.int64) + child * 65536)
            tokens[:, child] = keys.sort(dim=1, descending=True, stable=True).indices[:, 0]
    else:
        keys = _keys(scaled, positions, seeds, temperature, nodes)
        best = keys.sort(dim=1, descending=True, stable=True).indices[:, :num_children]
        tokens[:, : best.shape[1]] = best
    logprobs = torch.log_softmax(scaled.to(torch.float64), dim=1).gather(1, tokens.clamp(min=0)).to(torch.float32)
    # a token of -inf is not drawn, however few others there are
    is_drawn = (tokens >= 0) & (scaled.gather(1, tokens.clamp(min=0)) > float("-inf"))
    target_ids = tokens if d2t is None else tokens + d2t.to(torch.int64)[tokens.clamp(min=0)]
    return Output(torch.where(is_drawn, target_ids, -1), torch.where(is_drawn, logprobs, float("-inf")))


def _keys(scaled, positions, seeds, temperature, draws) -> torch.Tensor:
    """Scaled logits [R, Vd] plus the Gumbel noise of `draws` [R]; greedy rows go without noise."""
    key = random.random_block(seeds, positions, random.STREAM_DRAFT, draws)
    noise = random.gumbel_of_words(random.token_words(key, scaled.shape[1]))
    return torch.where((temperature >= GREEDY_BELOW)[:, None], scaled + noise, scaled)
