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

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.renorm_steps import (
    BRACKET_TUNING,
    EDGE_TUNING,
    LARGEST,
    LOW,
    check_renorm,
    launch_collect,
    launch_scan,
    launch_write,
    load_chunks,
    open_state,
    start_row,
    store_edge,
)
from .shared.threshold import bracket_by_mass, lowest_with_mass, wanted_mass


@triton.jit
def _top_p_renorm_bracket_kernel(
    top_p_ptr, scratch, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr
):
    """Finds two keys of a row between which the key of the least likely kept token lies, all but surely."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    chunk_largest = load_chunks(scratch.chunk_largest, row, NUM_CHUNKS)
    chunk_sample = load_chunks(scratch.chunk_sample, row, NUM_CHUNKS)
    chunk_sum = load_chunks(scratch.chunk_sum, row, NUM_CHUNKS)
    largest = tl.max(chunk_largest)
    # if the filter is off, everything that has mass is above the bracket
    low = lowest_with_mass(largest)
    high = low
    if top_p < 1.0:
        wanted = top_p * tl.sum(chunk_sum)
        low, high = bracket_by_mass(chunk_largest, chunk_sample, chunk_sum, wanted, low, largest + 1, CHUNK)
    start_row(open_state(scratch, row), low, high, largest)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_p_renorm_edge_kernel(
    top_p_ptr, probs_ptr, output_ptr, scratch, stride_probs_row,
    ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK_CANDIDATE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the key of the least likely token that stays, and the mass that does."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    state = open_state(scratch, row)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        row_ptr = probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT)
        candidates_ptr = output_ptr + row * VOCAB_SIZE
        wanted = wanted_mass(tl.load(state.sums_ptr + 1), top_p)
        lowest = lowest_with_mass(tl.load(state.words_ptr + LARGEST))
        store_edge(row_ptr, candidates_ptr, state, wanted, lowest, True, VOCAB_SIZE, BLOCK_CANDIDATE)
    else:
        tl.store(state.words_ptr + LOW, 1)


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
    device, num_rows = probs.device, len(probs)
    work = launch_scan("top_p_renorm", probs, out, has_sample=True, has_sum=True)
    bracket = work.chunks | {"top_p_ptr": top_p} | tuning.row(BRACKET_TUNING, device)
    launch("top_p_renorm", _top_p_renorm_bracket_kernel, (num_rows,), **bracket)
    launch_collect("top_p_renorm", work, "mass")
    edge = work.rows | {"top_p_ptr": top_p} | tuning.row(EDGE_TUNING, device)
    launch("top_p_renorm", _top_p_renorm_edge_kernel, (num_rows,), **edge)
    launch_write("top_p_renorm", work)
    return out
