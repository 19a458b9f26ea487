"""Keeps the smallest set of most likely tokens that holds top_p of each row's probability, and renormalizes.

Computes: Kept are the tokens with a probability of at least t, the largest one for which they hold top_p of the row's
    sum. No sort: the edge is found between two keys that a sample of the row suggests and exact sums confirm
    (shared/threshold.py).
Invariants: Sums are of whole numbers (`threshold.py`), and top_p times such a sum is rounded up from float64: which
    tokens stay, and the bits of the result, depend neither on the batch around a row nor on tuning. Where probabilities
    lie on a coarse dyadic grid all sums are exact.
Grid: (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches: 5
Traffic: R * V * (2 * element size + 4): each row is read twice and written once, and 128-byte lines that hold a kept
    token are read again. Lines of next to no probability (2^-40 of the largest) are read once.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared.renorm_steps import check_renorm, launch_steps


def contract(values: dict) -> check.Spec:
    return check_renorm("top_p_renorm", values, "top_p", (torch.float32,))


@launcher
def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the smallest set of most likely tokens that holds top_p of each row's probability, and renormalizes.

    Symbols: R rows of V tokens, 1..2^21.

    Args:
        probs: [R, V] fp32, fp16 or bf16. As in `top_k_renorm`.
        top_p: [R] fp32. The share of the row's sum that the kept tokens must hold; at <= 0 the most likely token alone.
            Off at >= 1 or NaN: the row is only divided by its sum.
        out: a tensor to write into.

    Returns:
        [R, V] fp32. As from `top_k_renorm`.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also refuses NaN in top_p.

    Source:
        The definition of FlashInfer's top_p_renorm_probs; the search without a sort is eagle_kernels' own.

    Example:
        >>> probs = torch.tensor([[0.375, 0.125, 0.375, 0.125]])
        >>> eagle_kernels.top_p_renorm(probs, torch.tensor([0.7])).tolist()  # 0.375 + 0.375 is at least 0.7
        [[0.5, 0.0, 0.5, 0.0]]
    """
    out = check.allocate("top_p_renorm", contract(locals()), out)
    launch_steps("top_p_renorm", probs, top_p, out)
    return out
