"""Reference of top_p_renorm."""

import torch

from ...renorm import clean_probs, fixed_point_masses, kept_and_renormalised


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """See eagle_kernels/ops/sampling/top_p_renorm.py."""
    probs = clean_probs(probs)
    ordered = probs.sort(dim=1, descending=True, stable=True).values
    mass = fixed_point_masses(ordered).cumsum(1)
    wanted = (mass[:, -1:].double() * top_p[:, None].double()).ceil().clamp(min=1).to(torch.int64)
    last = (mass < wanted).sum(dim=1, keepdim=True).clamp(max=probs.shape[1] - 1)
    is_on = (top_p < 1)[:, None]
    return kept_and_renormalised(probs, ~is_on | (probs >= ordered.gather(1, last)))
