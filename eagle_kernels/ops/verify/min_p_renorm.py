"""Keeps the tokens of each row whose probability is at least min_p of the largest one, and renormalises.

Computes
    probs / (sum of the kept probs) where kept, else 0. Kept are the tokens with a probability of at least
    min_p * the largest of the row, a product in fp32, rounded to nearest. The most likely tokens always stay: above 1
    min_p counts as 1.
Shapes
    probs   [R, V]  fp32 / fp16 / bf16, unit stride along V
    min_p   [R]     fp32    <= 0 (or NaN): off; the row is only divided by its sum
    -> out  [R, V]  fp32    must not overlap probs
Invariants
    NaN, infinite and negative entries count as 0; a row of nothing else gives 0. Tokens of probability 0 stay 0.
    The sum that divides is one of whole numbers (units of 2^-40 of the power of two at or below the row's largest
    probability, each rounded down): bits do not depend on the batch around a row, nor on tuning.
Grid
    (R, slices), one program for a slice of a row, or (R,), one for a row.
Launches
    4
Traffic
    R * V * (element size + 4): each row is read once and written once. 128-byte lines that hold a kept token are read
    twice more.
"""

from __future__ import annotations

import torch

from ...primitives import renorm
from ...primitives.dependent_launch import await_predecessor
from ...primitives.renorm import (
    BRACKET_TUNING,
    COLLECT_TUNING,
    NUM_STATES,
    NUM_SUMS,
    SCAN_TUNING,
    WRITE_TUNING,
    collect,
    load_chunks,
    min_p_key,
    start_row,
    summarise_chunks,
    write_kept,
)
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


@triton.jit(do_not_specialize=["stride_probs_row"])
def _min_p_renorm_scan_kernel(
    probs_ptr,
    chunk_largest_ptr,
    stride_probs_row,
    ALIGNMENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """The largest key of each chunk of one slice of a row."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    summarise_chunks(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + row * NUM_CHUNKS,
        None, None, tl.program_id(1), VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB, None,
    )  # fmt: skip


@triton.jit
def _min_p_renorm_edge_kernel(
    min_p_ptr,
    chunk_largest_ptr,
    state_ptr,
    sums_ptr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """The smallest key of a row that stays."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.max(load_chunks(chunk_largest_ptr + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_CHUNK))
    edge = min_p_key(largest, tl.load(min_p_ptr + row))
    start_row(state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, edge, edge, largest)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _min_p_renorm_sum_kernel(
    probs_ptr,
    chunk_largest_ptr,
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
    """Adds what stays of one slice of a row to the sum."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    collect(
        probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT), chunk_largest_ptr + row * NUM_CHUNKS,
        None, state_ptr + row * NUM_STATES, sums_ptr + row * NUM_SUMS, tl.program_id(1),
        None, VOCAB_SIZE, NUM_CHUNKS, CHUNK, BLOCK_VOCAB,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_probs_row"])
def _min_p_renorm_write_kernel(
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
    """Checks the arguments of `min_p_renorm` and describes its output."""
    return renorm.contract("min_p_renorm", values, "min_p", (torch.float32,))


@launcher
def min_p_renorm(probs: torch.Tensor, min_p: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps what is at least min_p as likely as the likeliest token of its row, divided by its sum; see the module."""
    out = check.allocate("min_p_renorm", contract(locals()), out)
    device, (num_rows, vocab_size) = probs.device, probs.shape
    sizes = renorm.chunking(vocab_size)
    rows = renorm.row_arguments(probs)
    chunk_largest = torch.empty((num_rows, sizes["NUM_CHUNKS"]), dtype=torch.int32, device=device)
    state = renorm.allocate_state(num_rows, device)
    scan, collecting, writing = (tuning.row(table, device) for table in (SCAN_TUNING, COLLECT_TUNING, WRITE_TUNING))
    launch(
        "min_p_renorm",
        _min_p_renorm_scan_kernel,
        (num_rows, triton.cdiv(vocab_size, scan["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        **rows,
        **sizes,
        **scan,
    )
    launch(
        "min_p_renorm",
        _min_p_renorm_edge_kernel,
        (num_rows,),
        min_p_ptr=min_p,
        chunk_largest_ptr=chunk_largest,
        NUM_CHUNKS=sizes["NUM_CHUNKS"],
        BLOCK_CHUNK=triton.next_power_of_2(sizes["NUM_CHUNKS"]),
        **state,
        **tuning.row(BRACKET_TUNING, device),
    )
    launch(
        "min_p_renorm",
        _min_p_renorm_sum_kernel,
        (num_rows, triton.cdiv(vocab_size, collecting["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        **state,
        **rows,
        **sizes,
        **collecting,
    )
    launch(
        "min_p_renorm",
        _min_p_renorm_write_kernel,
        (num_rows, triton.cdiv(vocab_size, writing["BLOCK_VOCAB"])),
        chunk_largest_ptr=chunk_largest,
        output_ptr=out,
        **state,
        **rows,
        **sizes,
        **writing,
    )
    return out
