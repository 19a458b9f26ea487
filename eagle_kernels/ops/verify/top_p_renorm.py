"""Keeps the smallest set of most likely tokens that holds top_p of each row's probability, and renormalises.

Computes
    probs / (sum of the kept probs) where kept, else 0. Kept are the tokens with a probability of at least t, the
    largest one for which they hold top_p of the row's sum: tokens that tie with t all stay, and the most likely token
    always does. No sort: the edge is found between two keys that a sample of the row suggests and exact sums confirm
    (primitives/threshold.py).
Shapes
    probs   [R, V]  fp32 / fp16 / bf16, unit stride along V; rows need not sum to 1
    top_p   [R]     fp32    >= 1 (or NaN): off; the row is only divided by its sum
    -> out  [R, V]  fp32    must not overlap probs
Invariants
    NaN, infinite and negative entries count as 0; a row of nothing else gives 0. Tokens of probability 0 stay 0.
    Sums are of whole numbers (units of 2^-40 of the power of two at or below the row's largest probability, each
    rounded down), and top_p of one is rounded up from float64: which tokens stay, and the bits of the result, depend
    neither on the batch around a row nor on tuning. Where probabilities lie on a coarse dyadic grid all sums are exact.
Grid
    (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches
    5
Traffic
    R * V * (2 * element size + 4): each row is read twice and written once, and 128-byte lines that hold a kept token
    are read again. Lines of next to no probability (2^-40 of the largest) are read once.
"""

from __future__ import annotations

import torch

from ...primitives import renorm
from ...primitives.dependent_launch import await_predecessor
from ...primitives.renorm import (
    BRACKET_TUNING,
    COLLECT_TUNING,
    EDGE_TUNING,
    LARGEST,
    LOW,
    NUM_STATES,
    NUM_SUMS,
    SCAN_TUNING,
    WRITE_TUNING,
    collect,
    find_edge,
    key_probability,
    load_chunks,
    start_row,
    summarise_chunks,
    write_kept,
)
from ...primitives.threshold import bracket_by_mass, lowest_with_mass, sample_offset, wanted_mass
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_p_renorm_scan_kernel(
    probs_ptr,
    chunk_largest_ptr,
    chunk_sample_ptr,
    chunk_mass_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Largest key, sample and mass of each chunk of one slice of a row."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = row * NUM_CHUNKS
    summarise_chunks(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + chunks,
        chunk_sample_ptr + chunks, chunk_mass_ptr + chunks, tl.program_id(1),
        VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB, sample_offset,
    )  # fmt: skip


@triton.jit
def _top_p_renorm_bracket_kernel(
    top_p_ptr,
    chunk_largest_ptr,
    chunk_sample_ptr,
    chunk_mass_ptr,
    state_ptr,
    sums_ptr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Two keys of a row, the least likely kept one all but surely between them."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    chunk_largest = load_chunks(chunk_largest_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK)
    chunk_sample = load_chunks(chunk_sample_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK)
    chunk_mass = load_chunks(chunk_mass_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK)
    largest = tl.max(chunk_largest)
    # where the filter is off: everything that has mass is above the bracket
    low = lowest_with_mass(largest)
    high = low
    if top_p < 1.0:
        low, high = bracket_by_mass(
            chunk_largest, chunk_sample, key_probability(chunk_largest), key_probability(chunk_sample), chunk_mass,
            top_p * tl.sum(chunk_mass), low, largest + 1, key_probability, CHUNK,
        )  # fmt: skip
    start_row(state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, low, high, largest)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_p_renorm_collect_kernel(
    probs_ptr,
    chunk_largest_ptr,
    candidates_ptr,
    state_ptr,
    sums_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """The mass of one slice of a row, of what lies above the bracket, and what lies in the bracket."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    collect(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + row * NUM_CHUNKS,
        candidates_ptr + row * VOCAB_SIZE, state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, tl.program_id(1),
        "mass", VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_p_renorm_edge_kernel(
    probs_ptr,
    top_p_ptr,
    candidates_ptr,
    state_ptr,
    sums_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_CANDIDATE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """The least likely key of a row that stays, and the mass that does."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * NUM_STATES
    sums_ptr += row * NUM_SUMS
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        edge, mass = find_edge(
            probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), candidates_ptr + row * VOCAB_SIZE,
            state_ptr, sums_ptr, wanted_mass(tl.load(sums_ptr + 1), top_p),
            lowest_with_mass(tl.load(state_ptr + LARGEST)), True, VOCAB_SIZE, BLOCK_CANDIDATE,
        )  # fmt: skip
        tl.store(state_ptr + LOW, edge)
        tl.store(sums_ptr, mass)
    else:
        tl.store(state_ptr + LOW, 1)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_p_renorm_write_kernel(
    probs_ptr,
    chunk_largest_ptr,
    state_ptr,
    sums_ptr,
    output_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """One slice of a row of the output."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    write_kept(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + row * NUM_CHUNKS,
        state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, output_ptr + row * VOCAB_SIZE, tl.program_id(1),
        VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB,
    )  # fmt: skip


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `top_p_renorm` and describes its output."""
    return renorm.contract("top_p_renorm", values, "top_p", (torch.float32,))


@launcher
def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the most likely tokens that hold top_p of each row, divided by their sum; see the module's docstring."""
    out = check.allocate("top_p_renorm", contract(locals()), out)
    device, (num_rows, vocab_size) = probs.device, probs.shape
    sizes = renorm.chunking(vocab_size)
    rows = renorm.row_arguments(probs)
    chunk_largest = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.int32, device=device)
    chunk_sample = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.int32, device=device)
    chunk_mass = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.float32, device=device)
    state = renorm.allocate_state(num_rows, device)
    scan, collecting, writing = (tuning.row(table, device) for table in (SCAN_TUNING, COLLECT_TUNING, WRITE_TUNING))
    launch(
        "top_p_renorm",
        _top_p_renorm_scan_kernel,
        (num_rows, triton.cdiv(vocab_size, scan["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        chunk_sample_ptr=chunk_sample,
        chunk_mass_ptr=chunk_mass,
        **rows,
        **sizes,
        **scan,
    )
    launch(
        "top_p_renorm",
        _top_p_renorm_bracket_kernel,
        (num_rows,),
        top_p_ptr=top_p,
        chunk_largest_ptr=chunk_largest,
        chunk_sample_ptr=chunk_sample,
        chunk_mass_ptr=chunk_mass,
        BLOCK_CHUNK=triton.next_power_of_2(sizes["NUM_CHUNKS"]),
        **state,
        NUM_CHUNKS=sizes["NUM_CHUNKS"],
        CHUNK=sizes["CHUNK"],
        **tuning.row(BRACKET_TUNING, device),
    )
    launch(
        "top_p_renorm",
        _top_p_renorm_collect_kernel,
        (num_rows, triton.cdiv(vocab_size, collecting["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        candidates_ptr=out,
        **state,
        **rows,
        **sizes,
        **collecting,
    )
    launch(
        "top_p_renorm",
        _top_p_renorm_edge_kernel,
        (num_rows,),
        top_p_ptr=top_p,
        candidates_ptr=out,
        VOCAB_SIZE=vocab_size,
        **state,
        **rows,
        **tuning.row(EDGE_TUNING, device),
    )
    launch(
        "top_p_renorm",
        _top_p_renorm_write_kernel,
        (num_rows, triton.cdiv(vocab_size, writing["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        output_ptr=out,
        **state,
        **rows,
        **sizes,
        **writing,
    )
    return out
