"""Reference of sample_from_logits."""

from __future__ import annotations

import torch

from ...sampling import draw_tokens


def sample_from_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """See eagle_kernels/ops/verify/sample_from_logits.py."""
    return draw_tokens(logits, positions, seeds, temperature, top_k, top_p, min_p)
