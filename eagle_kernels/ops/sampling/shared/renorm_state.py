"""The state of a row while top_k_renorm, top_p_renorm or min_p_renorm looks for its edge, from step to step.

The candidates of a row, the probabilities within its bracket, lie in the row of the output, which is written last.
`renorm_steps.py` names the steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import next_power_of_2, tl, triton
from .threshold import fixed_point_mass, largest_reaching, largest_reaching_in_memory, mass_value, probability_keys

STATES = 4
SUMS = 2
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
LARGEST = tl.constexpr(2)
NUM_CANDIDATES = tl.constexpr(3)

_STATES = tl.constexpr(STATES)
_SUMS = tl.constexpr(SUMS)


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
    return State(scratch.state + row * _STATES, scratch.sums + row * _SUMS)


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
    row_ptr,
    candidates_ptr,
    state,
    wanted,
    lowest,
    BY_MASS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_CANDIDATE: tl.constexpr,
):
    """Writes the edge and the mass that stays.

    The edge is the largest key, `lowest` or above, such that all keys >= it weigh `wanted` (a number, or a mass) or
    more. The row is read only if its bracket does not hold the edge.
    """
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
