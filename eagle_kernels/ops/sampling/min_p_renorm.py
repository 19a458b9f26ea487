"""Keeps the tokens of each row whose probability is at least min_p of the largest one, and renormalises.

Computes
    probs / (sum of the kept probs) where kept, else 0. Kept are the tokens with a probability of at least
    min_p * the largest of the row, a product in fp32, rounded to nearest.
Invariants
    The sum that divides is one of whole numbers (units of 2^-40 of the power of two at or below the row's largest
    probability, each rounded down): bits do not depend on the batch around a row, nor on tuning.
Grid
    (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches
    4
Traffic
    For R rows of V tokens R * V * (element size + 4): each row is read once and written once. 128-byte lines that hold
    a kept token are read twice more.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.renorm_state import load_chunks, open_state, start_row
from .shared.renorm_steps import BRACKET_TUNING, check_renorm, launch_collect, launch_scan, launch_write
from .shared.threshold import key_probability


@triton.jit
def _min_p_renorm_edge_kernel(
    min_p_ptr,
    scratch,
    NUM_CHUNKS: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the smallest key of a row that stays, 1 if the filter is off, as a bracket with nothing in it."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    min_p = tl.load(min_p_ptr + row)
    largest = tl.max(load_chunks(scratch.chunk_largest, row, NUM_CHUNKS))
    edge = (tl.minimum(min_p, 1.0) * key_probability(largest)).to(tl.int32, bitcast=True)
    edge = tl.where(min_p > 0.0, tl.maximum(edge, 1), 1)
    start_row(open_state(scratch, row), edge, edge, largest)


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `min_p_renorm` and describes its output."""
    return check_renorm("min_p_renorm", values, "min_p", (torch.float32,))


@launcher
def min_p_renorm(probs: torch.Tensor, min_p: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the tokens of each row that are at least min_p times as likely as the most likely one, and renormalises.

    Symbols: R rows of V tokens, 1..2^21.

    Args:
        probs: [R, V] fp32, fp16 or bf16. Probabilities, unit stride along V. Rows need not sum to 1. NaN, infinite and
            negative entries count as 0.
        min_p: [R] fp32. Off at <= 0 or NaN: the row is only divided by its sum. Above 1 it counts as 1.
        out: a tensor to write into. It must not overlap an argument.

    Returns:
        [R, V] fp32, written whole. The kept probabilities divided by their sum, 0 elsewhere. The most likely tokens
        always stay. A row without any mass gives 0.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range, or an overlap; the message names
            the argument.
        Not checked, unless EAGLE_KERNELS_DEBUG=1: that min_p is not NaN.

    Source:
        eagle_kernels' own, in the form of FlashInfer's top_k_renorm_probs.

    Example:
        >>> probs = torch.tensor([[0.375, 0.125, 0.375, 0.125]])
        >>> eagle_kernels.min_p_renorm(probs, torch.tensor([0.5])).tolist()  # what is less likely than 0.5 * 0.375 goes
        [[0.5, 0.0, 0.5, 0.0]]
    """
    out = check.allocate("min_p_renorm", contract(locals()), out)
    work = launch_scan("min_p_renorm", probs, out)
    edge = {name: work.chunks[name] for name in ("scratch", "NUM_CHUNKS")} | tuning.row(BRACKET_TUNING, probs.device)
    launch("min_p_renorm", _min_p_renorm_edge_kernel, (len(probs),), min_p_ptr=min_p, **edge)
    launch_collect("min_p_renorm", work, None)
    launch_write("min_p_renorm", work)
    return out
