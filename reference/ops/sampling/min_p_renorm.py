"""Reference of min_p_renorm."""

import torch

from ...renorm import clean_probs, kept_and_renormalised


def min_p_renorm(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """See eagle_kernels/ops/sampling/min_p_renorm.py."""
    probs = clean_probs(probs)
    edge = min_p.clamp(max=1.0)[:, None] * probs.amax(dim=1, keepdim=True)
    is_on = (min_p > 0)[:, None]
    return kept_and_renormalised(probs, ~is_on | (probs >= edge))
