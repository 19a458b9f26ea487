"""Keeps the top_k most likely tokens of each row of probabilities, and renormalises.

Computes
    probs / (sum of the kept probs) where kept, else 0. Kept are the tokens with a probability of at least the k-th
    largest one: tokens that tie with it all stay. No sort: the edge is found between two keys that a sample of the row
    suggests and exact counts confirm (primitives/threshold.py).
Shapes
    probs   [R, V]  fp32 / fp16 / bf16, unit stride along V
    top_k   [R]     int     <= 0 or >= V: off; the row is only divided by its sum
    -> out  [R, V]  fp32    must not overlap probs
Invariants
    NaN, infinite and negative entries count as 0; a row of nothing else gives 0. Tokens of probability 0 stay 0.
    The sum that divides is one of whole numbers (units of 2^-40 of the power of two at or below the row's largest
    probability, each rounded down): bits do not depend on the batch around a row, nor on tuning.
Grid
    (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches
    5
Traffic
    R * V * (element size + 4): each row is read once and written once. 128-byte lines that hold a kept token, or one
    close to the edge, are read up to three times.
"""

from __future__ import annotations

import torch

from ...primitives import renorm
from ...primitives.dependent_launch import await_predecessor
from ...primitives.renorm import (
    BRACKET_TUNING,
    COLLECT_TUNING,
    EDGE_TUNING,
    LOW,
    NUM_STATES,
    NUM_SUMS,
    SCAN_TUNING,
    WRITE_TUNING,
    collect,
    find_edge,
    load_chunks,
    start_row,
    summarise_chunks,
    write_kept,
)
from ...primitives.threshold import bracket_by_count, lowest_with_mass, sample_offset
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_k_renorm_scan_kernel(
    probs_ptr,
    chunk_largest_ptr,
    chunk_sample_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Largest key and sample of each chunk of one slice of a row."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = row * NUM_CHUNKS
    summarise_chunks(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + chunks,
        chunk_sample_ptr + chunks, None, tl.program_id(1),
        VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB, sample_offset,
    )  # fmt: skip


@triton.jit
def _top_k_renorm_bracket_kernel(
    top_k_ptr,
    chunk_largest_ptr,
    chunk_sample_ptr,
    state_ptr,
    sums_ptr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Two keys of a row, the k-th largest all but surely between them."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    chunk_largest = load_chunks(chunk_largest_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK)
    chunk_sample = load_chunks(chunk_sample_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK)
    largest = tl.max(chunk_largest)
    # where the filter is off: everything that has mass is above the bracket
    low = lowest_with_mass(largest)
    high = low
    if (top_k > 0) & (top_k < VOCAB_SIZE):
        low, high = bracket_by_count(chunk_largest, chunk_sample, top_k, tl.full([], 1, tl.int32), largest + 1, CHUNK)
    start_row(state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, low, high, largest)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_k_renorm_collect_kernel(
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
    """Number and mass of what lies above the bracket, and what lies in it, of one slice of a row."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    collect(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + row * NUM_CHUNKS,
        candidates_ptr + row * VOCAB_SIZE, state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, tl.program_id(1),
        "count", VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_k_renorm_edge_kernel(
    probs_ptr,
    top_k_ptr,
    candidates_ptr,
    state_ptr,
    sums_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_CANDIDATE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """The k-th largest key of a row, and the mass that stays."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * NUM_STATES
    sums_ptr += row * NUM_SUMS
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < VOCAB_SIZE):
        edge, mass = find_edge(
            probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), candidates_ptr + row * VOCAB_SIZE,
            state_ptr, sums_ptr, top_k.to(tl.int64), tl.full([], 1, tl.int32), False, VOCAB_SIZE, BLOCK_CANDIDATE,
        )  # fmt: skip
        tl.store(state_ptr + LOW, edge)
        tl.store(sums_ptr, mass)
    else:
        tl.store(state_ptr + LOW, 1)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _top_k_renorm_write_kernel(
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
    """Checks the arguments of `top_k_renorm` and describes its output."""
    return renorm.contract("top_k_renorm", values, "top_k", check.INTEGER)


@launcher
def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the top_k most likely tokens of each row, divided by their sum; shapes are in the module's docstring."""
    out = check.allocate("top_k_renorm", contract(locals()), out)
    device, (num_rows, vocab_size) = probs.device, probs.shape
    sizes = renorm.chunking(vocab_size)
    rows = renorm.row_arguments(probs)
    chunk_largest = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.int32, device=device)
    chunk_sample = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.int32, device=device)
    state = renorm.allocate_state(num_rows, device)
    scan, collecting, writing = (tuning.row(table, device) for table in (SCAN_TUNING, COLLECT_TUNING, WRITE_TUNING))
    launch(
        "top_k_renorm",
        _top_k_renorm_scan_kernel,
        (num_rows, triton.cdiv(vocab_size, scan["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        chunk_sample_ptr=chunk_sample,
        **rows,
        **sizes,
        **scan,
    )
    launch(
        "top_k_renorm",
        _top_k_renorm_bracket_kernel,
        (num_rows,),
        top_k_ptr=top_k,
        chunk_largest_ptr=chunk_largest,
        chunk_sample_ptr=chunk_sample,
        BLOCK_CHUNK=triton.next_power_of_2(sizes["NUM_CHUNKS"]),
        **state,
        **sizes,
        **tuning.row(BRACKET_TUNING, device),
    )
    launch(
        "top_k_renorm",
        _top_k_renorm_collect_kernel,
        (num_rows, triton.cdiv(vocab_size, collecting["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        candidates_ptr=out,
        **state,
        **rows,
        **sizes,
        **collecting,
    )
    launch(
        "top_k_renorm",
        _top_k_renorm_edge_kernel,
        (num_rows,),
        top_k_ptr=top_k,
        candidates_ptr=out,
        VOCAB_SIZE=vocab_size,
        **state,
        **rows,
        **tuning.row(EDGE_TUNING, device),
    )
    launch(
        "top_k_renorm",
        _top_k_renorm_write_kernel,
        (num_rows, triton.cdiv(vocab_size, writing["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        output_ptr=out,
        **state,
        **rows,
        **sizes,
        **writing,
    )
    return out
