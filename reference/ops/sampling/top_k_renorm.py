"""Reference of top_k_renorm."""

import torch

from ...renorm import clean_probs, kept_and_renormalised


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """See eagle_kernels/ops/sampling/top_k_renorm.py."""
    probs = clean_probs(probs)
    num_tokens = probs.shape[1]
    ordered = probs.sort(dim=1, descending=True, stable=True).values
    is_on = (top_k > 0) & (top_k < num_tokens)
    last = torch.where(is_on, top_k, num_tokens).to(torch.int64) - 1
    return kept_and_renormalised(probs, probs >= ordered.gather(1, last[:, None]))
