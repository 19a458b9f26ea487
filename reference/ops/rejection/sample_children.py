"""Reference of sample_children."""

from typing import NamedTuple

import torch

from ... import random
from ...sampling import GREEDY_BELOW, scaled_logits


class Output(NamedTuple):
    tokens: torch.Tensor
    logprobs: torch.Tensor


def sample_children(
    draft_logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor,
    nodes: torch.Tensor | None = None, d2t: torch.Tensor | None = None,
    *, num_children: int, replacement: bool = False,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/rejection/sample_children.py."""
    num_rows, vocab_size = draft_logits.shape
    scaled = scaled_logits(draft_logits, temperature).clamp(max=torch.finfo(torch.float32).max)
    nodes = torch.zeros_like(positions) if nodes is None else nodes
    tokens = torch.full((num_rows, num_children), -1, dtype=torch.int64, device=draft_logits.device)
    if replacement:
        for child in range(num_children):
            draws = nodes.to(torch.int64) + child * 65536
            tokens[:, child] = _order(scaled, positions, seeds, temperature, draws)[:, 0]
    else:
        best = _order(scaled, positions, seeds, temperature, nodes)[:, :num_children]
        tokens[:, : best.shape[1]] = best
    logprobs = torch.log_softmax(scaled.to(torch.float64), dim=1).gather(1, tokens.clamp(min=0)).to(torch.float32)
    # a token of -inf is not drawn, however few others there are
    is_drawn = (tokens >= 0) & (scaled.gather(1, tokens.clamp(min=0)) > float("-inf"))
    target_ids = tokens if d2t is None else tokens + d2t.to(torch.int64)[tokens.clamp(min=0)]
    return Output(torch.where(is_drawn, target_ids, -1), torch.where(is_drawn, logprobs, float("-inf")))


def _order(scaled, positions, seeds, temperature, draws) -> torch.Tensor:
    """Returns all ids, the largest first, by scaled logits [R, Vd] plus, but in greedy rows, noise of `draws` [R].
    Of equal ones those of larger fine bits are first, then lower ids."""
    words = random.token_words(random.random_block(seeds, positions, random.STREAM_DRAFT, draws), scaled.shape[1])
    is_sampled = (temperature >= GREEDY_BELOW)[:, None]
    keys = torch.where(is_sampled, scaled + random.gumbel(words), scaled)
    by_fine = torch.where(is_sampled, random.fine_bits(words), 0).sort(dim=1, descending=True, stable=True).indices
    return by_fine.gather(1, keys.gather(1, by_fine).sort(dim=1, descending=True, stable=True).indices)
