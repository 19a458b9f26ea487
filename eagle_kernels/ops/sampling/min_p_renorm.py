"""Keeps the tokens of each row whose probability is at least min_p of the largest one, and renormalizes.

Computes: Kept are the tokens of at least min_p * the largest probability, a product in fp32, rounded to nearest.
Invariants: The sum that divides is one of whole numbers (`threshold.py`): bits do not depend on the batch around a row,
    nor on tuning.
Grid: (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches: 4
Traffic: R * V * (element size + 4): each row is read once and written once. 128-byte lines that hold a kept token are
    read twice more.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared.renorm_steps import check_renorm, launch_steps


def contract(values: dict) -> check.Spec:
    return check_renorm("min_p_renorm", values, "min_p", (torch.float32,))


@launcher
def min_p_renorm(probs: torch.Tensor, min_p: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the tokens of each row that are at least min_p times as likely as the most likely one, and renormalizes.

    Symbols: R rows of V tokens, 1..2^21.

    Args:
        probs: [R, V] fp32, fp16 or bf16. As in `top_k_renorm`.
        min_p: [R] fp32. Off at <= 0 or NaN: the row is only divided by its sum. Above 1 it counts as 1.
        out: a tensor to write into.

    Returns:
        [R, V] fp32. The kept probabilities divided by their sum, 0 elsewhere and in a row without mass. The most likely
        tokens always stay.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also refuses NaN in min_p.

    Source:
        eagle_kernels' own, in the form of FlashInfer's top_k_renorm_probs.

    Example:
        >>> probs = torch.tensor([[0.375, 0.125, 0.375, 0.125]])
        >>> eagle_kernels.min_p_renorm(probs, torch.tensor([0.5])).tolist()  # drops tokens below 0.5 * 0.375
        [[0.5, 0.0, 0.5, 0.0]]
    """
    out = check.allocate("min_p_renorm", contract(locals()), out)
    launch_steps("min_p_renorm", probs, min_p, out)
    return out
