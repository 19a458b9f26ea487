"""The launched steps that top_k_renorm, top_p_renorm and min_p_renorm share: kernels and their launches.

    scan       by slices: the largest key of every chunk; if wanted, a sample of it and its sum
    bracket    by rows: two keys with the edge between them (min_p: the edge twice), the state of the row (`start_row`)
    collect    by slices: the weight above the bracket, and the probabilities within it, gathered
    edge       by rows, but for min_p: the edge, exactly, and the mass that stays (`store_edge`)
    write      by slices: kept probabilities divided by their mass, 0 for the others

`threshold.py` explains keys, masses and brackets; `Scratch` is what the steps write about a row for the next ones. By
the largest keys of chunks later steps read only the chunks they need. The candidates of a row, the probabilities within
its bracket, lie in the row of the output, which is written last. FILTER is "top_k", "top_p" or "min_p".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import check, tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .threshold import (
    MAX_VOCAB_SIZE,
    bracket_by_count,
    bracket_by_mass,
    fixed_point_mass,
    key_probability,
    largest_reaching,
    largest_reaching_in_memory,
    lowest_with_mass,
    mass_value,
    probability_keys,
    sample_offset,
    wanted_mass,
)

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/renorm.txt. Slices are small in steps that leave out slices without what
# they look for.
SCAN_TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 4}}
BRACKET_TUNING = {"default": {"num_warps": 8}}
COLLECT_TUNING = {"default": {"BLOCK_VOCAB": 1024, "num_warps": 1}}
EDGE_TUNING = {"default": {"BLOCK_CANDIDATE": 8192, "num_warps": 8}}
WRITE_TUNING = {"default": {"BLOCK_VOCAB": 1024, "num_warps": 1}}

# A chunk, which can be left out when a row is read again, has at least a cache line of fp32. A bracket is found from
# MAX_CHUNKS at most.
MIN_CHUNK_SIZE = 32
MAX_CHUNKS = 8192

# places in a row's state, see Scratch
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
LARGEST = tl.constexpr(2)
NUM_CANDIDATES = tl.constexpr(3)


class Scratch(NamedTuple):
    """Pointers to what a step leaves for the next about C chunks of each row, and about each row."""

    chunk_largest: Any  # int32 [R, C], keys
    chunk_sample: Any  # int32 [R, C], keys; None, as the next one: the op's bracket does not need it
    chunk_sum: Any  # fp32 [R, C]
    state: Any  # int32 [R, 4]: LOW (at the end the edge), HIGH, LARGEST, NUM_CANDIDATES
    # int64 [R, 2]: mass of the keys >= HIGH (at the end of the kept ones); the number of these keys or the row's mass
    sums: Any


class State(NamedTuple):
    """Pointers to the state of one row."""

    words_ptr: Any
    sums_ptr: Any


@triton.jit
def open_state(scratch, row):
    """Returns the State of the row with the number `row` int64."""
    return State(scratch.state + row * 4, scratch.sums + row * 2)


@triton.jit
def load_chunks(chunk_ptr, row, NUM_CHUNKS: tl.constexpr):
    """Returns what the scan wrote of all chunks of a row; 0 where there is no chunk."""
    chunk = tl.arange(0, next_power_of_2(NUM_CHUNKS))
    return tl.load(chunk_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0)


@triton.jit
def start_row(state, low, high, largest):
    """Writes the bracket of a row that has no sums and no candidates yet."""
    tl.store(state.words_ptr + LOW, low)
    tl.store(state.words_ptr + HIGH, high)
    tl.store(state.words_ptr + LARGEST, largest)
    tl.store(state.words_ptr + NUM_CANDIDATES, 0)
    tl.store(state.sums_ptr, tl.zeros([], tl.int64))
    tl.store(state.sums_ptr + 1, tl.zeros([], tl.int64))


@triton.jit
def store_edge(
    row_ptr, candidates_ptr, state, wanted, lowest,
    BY_MASS: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK_CANDIDATE: tl.constexpr,
):  # fmt: skip
    """Writes the edge and the mass that stays. The edge is the largest key, `lowest` or above, such that all keys >= it
    weigh `wanted` (a number, or a mass) or more. The row is read only if its bracket does not hold the edge."""
    low = tl.load(state.words_ptr + LOW)
    high = tl.load(state.words_ptr + HIGH)
    largest = tl.load(state.words_ptr + LARGEST)
    num_candidates = tl.load(state.words_ptr + NUM_CANDIDATES)
    mass_above = tl.load(state.sums_ptr)
    above = mass_above if BY_MASS else tl.load(state.sums_ptr + 1)
    BLOCK: tl.constexpr = BLOCK_CANDIDATE // 2

    # the keys of the row between which the edge lies if it is not in the bracket
    is_missed = above >= wanted
    row_low = high
    row_high = largest + 1
    edge = low
    mass = mass_above
    if above < wanted:
        if num_candidates <= BLOCK_CANDIDATE:
            index = tl.arange(0, BLOCK_CANDIDATE)
            is_candidate = index < num_candidates
            keys = probability_keys(tl.load(candidates_ptr + index, mask=is_candidate, other=0.0))
            masses = tl.where(is_candidate, fixed_point_mass(keys, largest), 0)
            weights = masses if BY_MASS else is_candidate.to(tl.int32)
            is_missed = above + tl.sum(weights) < wanted
            # the edge is the key of one of the candidates
            first = tl.maximum(tl.min(tl.where(is_candidate, keys, high)), low)
            end = tl.maximum(tl.max(keys) + 1, first)
            edge = largest_reaching(keys, weights, wanted - above, first, end)
            mass += tl.sum(tl.where(keys >= edge, masses, 0))
        else:
            edge, count, candidate_mass = largest_reaching_in_memory(
                candidates_ptr, num_candidates, wanted - above, low, high, largest, BY_MASS, BLOCK
            )
            is_missed = above + (candidate_mass if BY_MASS else count) < wanted
            mass += candidate_mass
        is_missed = is_missed & (low > lowest)
        row_low = lowest
        row_high = low
    if is_missed:
        edge, _, mass = largest_reaching_in_memory(
            row_ptr, VOCAB_SIZE, wanted, row_low, row_high, largest, BY_MASS, BLOCK
        )
    tl.store(state.words_ptr + LOW, edge)
    tl.store(state.sums_ptr, mass)


@triton.jit
def load_edge(state):
    """Returns the edge of a row and, fp32, the mass that stays."""
    edge = tl.load(state.words_ptr + LOW)
    mass = tl.load(state.sums_ptr)
    return edge, mass_value(mass, tl.load(state.words_ptr + LARGEST))


@triton.jit(do_not_specialize=["stride_probs_row"])
def _renorm_scan_kernel(
    probs_ptr, scratch, stride_probs_row,
    ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes largest key, sampled key and fp32 sum of each chunk of a slice; the last two if there is a pointer."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += tl.multiple_of(row * stride_probs_row, ALIGNMENT)
    BLOCK_CHUNK: tl.constexpr = BLOCK_VOCAB // CHUNK
    chunk = tl.program_id(1) * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    keys = probability_keys(tl.load(probs_ptr + token, mask=token < VOCAB_SIZE, other=0.0))
    place = row * NUM_CHUNKS + chunk
    tl.store(scratch.chunk_largest + place, tl.max(keys, axis=1), mask=chunk < NUM_CHUNKS)
    if scratch.chunk_sample is not None:
        token = chunk * CHUNK + sample_offset(chunk, CHUNK)
        sample = probability_keys(tl.load(probs_ptr + token, mask=token < VOCAB_SIZE, other=0.0))
        tl.store(scratch.chunk_sample + place, sample, mask=chunk < NUM_CHUNKS)
    if scratch.chunk_sum is not None:
        tl.store(scratch.chunk_sum + place, tl.sum(key_probability(keys), axis=1), mask=chunk < NUM_CHUNKS)


@triton.jit
def _renorm_bracket_kernel(
    limit_ptr, scratch,
    FILTER: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds two keys of a row between which its edge lies, all but surely; of min_p the edge is both."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limit_ptr + row)
    chunk_largest = load_chunks(scratch.chunk_largest, row, NUM_CHUNKS)
    if FILTER != "min_p":
        chunk_sample = load_chunks(scratch.chunk_sample, row, NUM_CHUNKS)
    if FILTER == "top_p":
        chunk_sum = load_chunks(scratch.chunk_sum, row, NUM_CHUNKS)
    largest = tl.max(chunk_largest)
    # if the filter is off, everything that has mass is above the bracket
    low = lowest_with_mass(largest)
    high = low
    if FILTER == "top_k":
        if (limit > 0) & (limit < VOCAB_SIZE):
            lowest = tl.full([], 1, tl.int32)
            low, high = bracket_by_count(chunk_largest, chunk_sample, limit, lowest, largest + 1, CHUNK)
    elif FILTER == "top_p":
        if limit < 1.0:
            wanted = limit * tl.sum(chunk_sum)
            low, high = bracket_by_mass(chunk_largest, chunk_sample, chunk_sum, wanted, low, largest + 1, CHUNK)
    else:
        low = (tl.minimum(limit, 1.0) * key_probability(largest)).to(tl.int32, bitcast=True)
        low = tl.where(limit > 0.0, tl.maximum(low, 1), 1)
        high = low
    start_row(open_state(scratch, row), low, high, largest)


@triton.jit
def _open_slice(scratch, row, lowest, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Returns the tokens [chunks, CHUNK] of a slice, which chunks [chunks] have a key >= lowest, whether any has."""
    BLOCK_CHUNK: tl.constexpr = BLOCK_VOCAB // CHUNK
    chunk = tl.program_id(1) * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    largest = tl.load(scratch.chunk_largest + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return token, largest >= lowest, tl.max(largest) >= lowest


@triton.jit
def _load_keys(row_ptr, token, is_read, VOCAB_SIZE: tl.constexpr):
    """Returns the keys of a slice's tokens, 0 in chunks that are not read."""
    return probability_keys(tl.load(row_ptr + token, mask=is_read[:, None] & (token < VOCAB_SIZE), other=0.0))


@triton.jit(do_not_specialize=["stride_probs_row"])
def _renorm_collect_kernel(
    probs_ptr, output_ptr, scratch, stride_probs_row,
    ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    FILTER: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Adds a slice to the sums of its row, and its probabilities between LOW and HIGH to the row's candidates.
    min_p has neither candidates nor a second sum."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += tl.multiple_of(row * stride_probs_row, ALIGNMENT)
    candidates_ptr = output_ptr + row * VOCAB_SIZE
    state = open_state(scratch, row)
    low = tl.load(state.words_ptr + LOW)
    high = tl.load(state.words_ptr + HIGH)
    largest = tl.load(state.words_ptr + LARGEST)
    lowest = tl.minimum(low, lowest_with_mass(largest)) if FILTER == "top_p" else low
    token, is_read, is_any = _open_slice(scratch, row, lowest, NUM_CHUNKS, CHUNK, BLOCK_VOCAB)
    if is_any:
        keys = _load_keys(probs_ptr, token, is_read, VOCAB_SIZE)
        mass = fixed_point_mass(keys, largest)
        is_above = keys >= high
        above = tl.sum(tl.where(is_above, mass, 0))
        tl.atomic_add(state.sums_ptr, above, mask=above > 0, sem="relaxed")
        if FILTER == "top_p":
            total = tl.sum(mass)
            tl.atomic_add(state.sums_ptr + 1, total, mask=total > 0, sem="relaxed")
        elif FILTER == "top_k":
            count = tl.sum(is_above.to(tl.int32)).to(tl.int64)
            tl.atomic_add(state.sums_ptr + 1, count, mask=count > 0, sem="relaxed")
        if FILTER != "min_p":
            is_candidate = (keys >= low) & (keys < high)
            in_chunk = tl.cumsum(is_candidate.to(tl.int32), axis=1)
            of_chunk = tl.sum(is_candidate.to(tl.int32), axis=1)
            num_candidates = tl.sum(of_chunk)
            if num_candidates > 0:
                # the order does not matter: what is found among the candidates does not depend on it
                first = tl.atomic_add(state.words_ptr + NUM_CANDIDATES, num_candidates, sem="relaxed")
                place = first + (tl.cumsum(of_chunk, axis=0) - of_chunk)[:, None] + in_chunk - 1
                # place and key travel as one number: then the compiler may store them in the order in which threads
                # hold them, instead of sorting both through shared memory into the order of neighbouring places
                pairs = (tl.where(is_candidate, place, -1).to(tl.int64) << 32) | keys
                pairs = tl.reshape(pairs, [BLOCK_VOCAB], can_reorder=True)
                tl.store(candidates_ptr + (pairs >> 32), key_probability(pairs.to(tl.int32)), mask=pairs >= 0)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _renorm_edge_kernel(
    limit_ptr, probs_ptr, output_ptr, scratch, stride_probs_row,
    FILTER: tl.constexpr, ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK_CANDIDATE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the key of the least likely token of a row that stays, and the mass that does."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    state = open_state(scratch, row)
    limit = tl.load(limit_ptr + row)
    BY_MASS: tl.constexpr = FILTER == "top_p"
    is_on = limit < 1.0 if BY_MASS else (limit > 0) & (limit < VOCAB_SIZE)
    if is_on:
        row_ptr = probs_ptr + tl.multiple_of(row * stride_probs_row, ALIGNMENT)
        candidates_ptr = output_ptr + row * VOCAB_SIZE
        if BY_MASS:
            wanted = wanted_mass(tl.load(state.sums_ptr + 1), limit)
            lowest = lowest_with_mass(tl.load(state.words_ptr + LARGEST))
        else:
            wanted = limit.to(tl.int64)
            lowest = tl.full([], 1, tl.int32)
        store_edge(row_ptr, candidates_ptr, state, wanted, lowest, BY_MASS, VOCAB_SIZE, BLOCK_CANDIDATE)
    else:
        tl.store(state.words_ptr + LOW, 1)


@triton.jit(do_not_specialize=["stride_probs_row"])
def _renorm_write_kernel(
    probs_ptr, output_ptr, scratch, stride_probs_row,
    ALIGNMENT: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes a slice of a row of the output: what reaches LOW divided by the first sum, 0 for the rest."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += tl.multiple_of(row * stride_probs_row, ALIGNMENT)
    output_ptr += row * VOCAB_SIZE
    edge, mass = load_edge(open_state(scratch, row))
    token, is_read, is_any = _open_slice(scratch, row, edge, NUM_CHUNKS, CHUNK, BLOCK_VOCAB)
    if is_any:
        keys = _load_keys(probs_ptr, token, is_read, VOCAB_SIZE)
        # a row without mass keeps nothing, and is not divided by it
        kept = tl.math.div_rn(key_probability(keys), tl.where(mass > 0.0, mass, 1.0))
        tl.store(output_ptr + token, tl.where(keys >= edge, kept, 0.0), mask=token < VOCAB_SIZE)
    else:
        tl.store(output_ptr + token, tl.zeros(token.shape, tl.float32), mask=token < VOCAB_SIZE)


def check_renorm(op: str, values: dict, parameter: str, dtypes: tuple) -> check.Spec:
    """Checks `probs` and the filter's parameter, and describes the output."""
    args = check.Arguments(op, values)
    args.tensor("probs", ("R", "V"), check.FLOAT, contiguous=1)
    if args.tensor(parameter, ("R",), dtypes).is_floating_point():
        args.debug_numbers(parameter)
    if not 1 <= args.size("V") <= MAX_VOCAB_SIZE:
        args.fail("probs", f"have 1..{MAX_VOCAB_SIZE} tokens a row", list(values["probs"].shape))
    return args.spec((args.size("R"), args.size("V")), torch.float32)


def launch_steps(op: str, probs: torch.Tensor, limit: torch.Tensor, out: torch.Tensor) -> None:
    """Launches all steps, and allocates what they write for each other; `limit` is the filter's parameter."""
    name, device, (num_rows, vocab_size) = op.removesuffix("_renorm"), probs.device, probs.shape
    chunk = max(MIN_CHUNK_SIZE, next_power_of_2(vocab_size) // MAX_CHUNKS)
    # a multiple of 4, so that the chunks of every row begin at 16 bytes
    num_chunks = triton.cdiv(triton.cdiv(vocab_size, chunk), 4) * 4
    scratch = Scratch(
        torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device),
        None if name == "min_p" else torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device),
        torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device) if name == "top_p" else None,
        torch.empty((num_rows, 4), dtype=torch.int32, device=device),
        torch.empty((num_rows, 2), dtype=torch.int64, device=device),
    )
    rows = {
        "probs_ptr": probs, "scratch": scratch, "stride_probs_row": probs.stride(0), "VOCAB_SIZE": vocab_size,
        "ALIGNMENT": math.gcd(probs.stride(0), 16),  # a divisor of every row's offset, so that loads can be wide
    }  # fmt: skip
    chunks = {"scratch": scratch, "NUM_CHUNKS": num_chunks, "CHUNK": chunk}
    filtering = {"limit_ptr": limit, "FILTER": name, "VOCAB_SIZE": vocab_size}
    _launch_by_slices(op, _renorm_scan_kernel, SCAN_TUNING, rows | chunks)
    launch(op, _renorm_bracket_kernel, (num_rows,), **(chunks | filtering), **tuning.row(BRACKET_TUNING, device))
    rows["output_ptr"] = out
    _launch_by_slices(op, _renorm_collect_kernel, COLLECT_TUNING, rows | chunks | {"FILTER": name})
    if name != "min_p":
        launch(op, _renorm_edge_kernel, (num_rows,), **(rows | filtering), **tuning.row(EDGE_TUNING, device))
    _launch_by_slices(op, _renorm_write_kernel, WRITE_TUNING, rows | chunks)


def _launch_by_slices(op: str, kernel, table: dict, arguments: dict) -> None:
    """Launches a kernel of which one program takes one slice of a row."""
    probs = arguments["probs_ptr"]
    row = tuning.row(table, probs.device)
    launch(op, kernel, (probs.shape[0], triton.cdiv(probs.shape[1], row["BLOCK_VOCAB"])), **arguments, **row)
