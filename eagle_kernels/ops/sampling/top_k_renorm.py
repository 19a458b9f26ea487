"""Keeps the top_k most likely tokens of each row of probabilities, and renormalizes.

Computes: Kept are the tokens with a probability of at least the k-th largest one. No sort: the edge is found between
    two keys that a sample of the row suggests and exact counts confirm (shared/threshold.py).
Invariants: The sum that divides is one of whole numbers (`threshold.py`): bits do not depend on the batch around a row,
    nor on tuning.
Grid: (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches: 5
Traffic: R * V * (element size + 4): each row is read once and written once. 128-byte lines that hold a kept token, or
    one close to the edge, are read up to three times.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared.renorm_steps import check_renorm, launch_steps


def contract(values: dict) -> check.Spec:
    return check_renorm("top_k_renorm", values, "top_k", check.INTEGER)


@launcher
def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the top_k most likely tokens of each row of probabilities, and renormalizes.

    Symbols: R rows of V tokens, 1..2^21.

    Args:
        probs: [R, V] fp32, fp16 or bf16. Unit stride along V. Rows need not sum to 1; NaN, infinite and negative
            entries count as 0.
        top_k: [R] int. How many tokens to keep. Off at <= 0 or >= V: the row is only divided by its sum.
        out: a tensor to write into.

    Returns:
        [R, V] fp32. The kept probabilities divided by their sum, 0 elsewhere and in a row without mass. Tokens that tie
        with the last kept one all stay.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        The definition of FlashInfer's top_k_renorm_probs; the search without a sort is eagle_kernels' own.

    Example:
        >>> probs = torch.tensor([[0.375, 0.125, 0.25, 0.25], [0.375, 0.125, 0.375, 0.125]])
        >>> eagle_kernels.top_k_renorm(probs, torch.tensor([1, 1])).tolist()  # two tie in the second row
        [[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]]
    """
    out = check.allocate("top_k_renorm", contract(locals()), out)
    launch_steps("top_k_renorm", probs, top_k, out)
    return out
