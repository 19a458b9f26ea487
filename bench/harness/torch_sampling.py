"""The plain torch formulation of sampling rows of logits, which the sampling benchmarks share."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """One token id a row, by softmax, a sort where there is a filter, and an exponential race."""
    probs = torch.softmax(logits.float() / temperature[:, None], dim=-1)
    if top_k is not None or top_p is not None:
        probs, token_ids = probs.sort(dim=-1, descending=True)
        if top_k is not None:
            rank = torch.arange(probs.shape[1], device=probs.device)
            probs = probs.masked_fill(rank >= top_k[:, None], 0.0)
        if top_p is not None:
            mass = probs.sum(-1, keepdim=True)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None] * mass, 0.0)
        winner = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return token_ids.gather(1, winner).squeeze(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)
