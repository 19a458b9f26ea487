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

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.renorm_steps import (
    BRACKET_TUNING,
    EDGE_TUNING,
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
from .shared.threshold import bracket_by_count, lowest_with_mass


@triton.jit
def _top_k_renorm_bracket_kernel(
    top_k_ptr, scratch,
    VOCAB_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds two keys of a row between which the k-th largest lies, all but surely."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    chunk_largest = load_chunks(scratch.chunk_largest, row, NUM_CHUNKS)
    chunk_sample = load_chunks(scratch.chunk_sample, row, NUM_CHUNKS)
    largest = tl.max(chunk_largest)
    # if the filter is off, everything that has mass is above the bracket
    low = lowest_with_mass(largest)
    high = low
    if (top_k > 0) & (top_k < VOCAB_SIZE):
        low, high = bracket_by_count(chunk_largest, chunk_sample, top_k, tl.full([], 1, tl.int32), largest + 1, CHUNK)
    start_row(open_state(scratch, row), low, high, largest)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_k_renorm_edge_kernel(
    top_k_ptr, probs_ptr, output_ptr, scratch, stride_probs_row,
    ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK_CANDIDATE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the k-th largest key of a row, and the mass that stays."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    state = open_state(scratch, row)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < VOCAB_SIZE):
        row_ptr = probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT)
        candidates_ptr = output_ptr + row * VOCAB_SIZE
        lowest = tl.full([], 1, tl.int32)
        store_edge(row_ptr, candidates_ptr, state, top_k.to(tl.int64), lowest, False, VOCAB_SIZE, BLOCK_CANDIDATE)
    else:
        tl.store(state.words_ptr + LOW, 1)


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
    device, (num_rows, vocab_size) = probs.device, probs.shape
    work = launch_scan("top_k_renorm", probs, out, has_sample=True)
    bracket = work.chunks | {"top_k_ptr": top_k, "VOCAB_SIZE": vocab_size} | tuning.row(BRACKET_TUNING, device)
    launch("top_k_renorm", _top_k_renorm_bracket_kernel, (num_rows,), **bracket)
    launch_collect("top_k_renorm", work, "count")
    edge = work.rows | {"top_k_ptr": top_k} | tuning.row(EDGE_TUNING, device)
    launch("top_k_renorm", _top_k_renorm_edge_kernel, (num_rows,), **edge)
    launch_write("top_k_renorm", work)
    return out
