"""Filters by reading the row again, where the tokens that were gathered of it are not enough (see `filters.py`).

An edge is searched for three bits of the float at a time: each pass over the row counts, or weighs, the tokens that
reach eight ranks at once. That makes up to eleven passes a filter; blocks that cannot reach an edge are passed over.

To draw, no edge of top-p is needed, only for log-probabilities. The winner among all tokens is the winner among those
that top-p keeps, if it is kept itself, and one pass tells: it weighs what lies above the winner. From above a winner
that is not kept it is drawn again. So a nucleus of 95 % takes one draw and one such pass in 19 rows of 20.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY, noisy_key, noisy_key_id, unsigned_rank
from ....runtime.language import tl, triton
from .logits import load_scaled
from .random import add_grouped_gumbel, grouped_words, noise_key
from .row_summary import CHUNK, row_mass

# Tokens that are read at once.
_BLOCK = tl.constexpr(2048)


class _Scanned(NamedTuple):
    """A row, what has been kept of it, and its largest value."""

    row: Any
    summary: Any
    largest: Any


@triton.jit
def _rank(value):
    """Returns uint32 that order as the values do, 0 for -inf: what cannot be drawn reaches no edge above 0."""
    return tl.where(value == float("-inf"), 0, unsigned_rank(value))


@triton.jit
def search_row(
    row,
    filters,
    summary,
    noise,
    largest,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    """Draws a token int32 from what the filters keep of a row; returns it and, with HAS_LOGPROBS, the kept sum."""
    scanned = _Scanned(row, summary, largest)
    lowest = tl.full([], 1, tl.uint32)
    above = unsigned_rank(largest) + 1
    edge = lowest
    if filters.top_k > 0:
        wanted = filters.top_k.to(tl.float32)
        edge = _search_edge(scanned, edge, above, wanted, VOCAB_SIZE, HAS_PENALTIES, False)
    wanted = tl.full([], float("inf"), tl.float32)  # all that reach the edge
    if filters.top_p < 1.0:
        if filters.is_of_all:
            mass = row_mass(summary.chunk_max, summary.chunk_sum, largest, VOCAB_SIZE)
        else:
            mass = _mass(scanned, edge, VOCAB_SIZE, HAS_PENALTIES)
        # the most likely token weighs 1 and always stays, also for top_p = 0
        wanted = tl.maximum(mass * filters.top_p, 1.1754943508222875e-38)

    first_edge = edge
    token = tl.zeros([], tl.int32)
    kept = tl.zeros([], tl.float32)
    is_open = above > edge  # the most likely token reaches every edge
    while is_open:
        token, kept = _draw(scanned, filters, noise, edge, VOCAB_SIZE, HAS_PENALTIES)
        edge = _rank(load_scaled(row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)) + 1
        is_open = (filters.top_p < 1.0) & (edge < above)
        if is_open:  # what weighs as much as is wanted lies above the token, which is not kept then
            is_open = _mass(scanned, edge, VOCAB_SIZE, HAS_PENALTIES) >= wanted
    if HAS_LOGPROBS:
        if filters.top_p < 1.0:
            edge = _search_edge(scanned, lowest, above, wanted, VOCAB_SIZE, HAS_PENALTIES, True)
            _, kept = _draw(scanned, filters, noise, tl.maximum(first_edge, edge), VOCAB_SIZE, HAS_PENALTIES)
    return token, kept


@triton.jit
def _draw(scanned, filters, noise, edge, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr):
    """Draws a token int32 from those that reach an edge and min-p; returns it and their sum of exponentials."""
    key = noise_key(noise)
    lane = tl.arange(0, _BLOCK)
    best = tl.full([_BLOCK], LOWEST_KEY, tl.int64)
    kept = tl.zeros([_BLOCK], tl.float32)
    for start in range(0, VOCAB_SIZE, _BLOCK):
        if _chunk_rank(scanned.summary, start, VOCAB_SIZE) >= edge:
            token = start + lane
            value = load_scaled(scanned.row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)
            weight = tl.exp(value - scanned.largest)
            keep = (token < VOCAB_SIZE) & (_rank(value) >= edge)
            if filters.min_p > 0.0:
                keep &= weight >= tl.minimum(filters.min_p, 1.0)
            kept += tl.where(keep, weight, 0.0)
            noisy, fine = add_grouped_gumbel(value, grouped_words(key, token))
            best = tl.maximum(best, tl.where(keep, noisy_key(noisy, fine, token), LOWEST_KEY))
    return noisy_key_id(tl.max(best)), tl.sum(kept)


@triton.jit
def _search_edge(
    scanned,
    low,
    high,
    wanted,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Returns the largest rank that `wanted` tokens reach, or tokens that weigh `wanted` together."""
    while high - low > 1:
        step = (high - low + 7) // 8
        reaching = _reaching(scanned, low, step, VOCAB_SIZE, HAS_PENALTIES, IS_MASS)
        chosen = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32)) - 1, 0)
        low += chosen.to(tl.uint32) * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _mass(scanned, low, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr):
    """Returns what the tokens that reach a rank weigh together, fp32."""
    weights = tl.zeros([_BLOCK], tl.float32)
    for start in range(0, VOCAB_SIZE, _BLOCK):
        if _chunk_rank(scanned.summary, start, VOCAB_SIZE) >= low:
            token = start + tl.arange(0, _BLOCK)
            value = load_scaled(scanned.row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)
            weights += tl.where(_rank(value) >= low, tl.exp(value - scanned.largest), 0.0)
    return tl.sum(weights)


@triton.jit
def _reaching(scanned, low, step, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr, IS_MASS: tl.constexpr):
    """Returns how many tokens, or what weight of them, reach each of the ranks low, low + step, ...: fp32 [8]."""
    threshold = low + tl.arange(0, 8).to(tl.uint32) * step
    counts = tl.zeros([_BLOCK, 8], tl.float32)
    for start in range(0, VOCAB_SIZE, _BLOCK):
        if _chunk_rank(scanned.summary, start, VOCAB_SIZE) >= low:
            token = start + tl.arange(0, _BLOCK)
            value = load_scaled(scanned.row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)
            rank = _rank(value)
            if IS_MASS:
                weight = tl.exp(value - scanned.largest)
                counts += tl.where(rank[:, None] >= threshold[None, :], weight[:, None], 0.0)
            else:
                counts += (rank[:, None] >= threshold[None, :]).to(tl.float32)
    return tl.sum(counts, axis=0)


@triton.jit
def _chunk_rank(summary, start, VOCAB_SIZE: tl.constexpr):
    """Returns the rank of the largest value of _BLOCK tokens from `start` on."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    chunk = start // CHUNK + tl.arange(0, _BLOCK // CHUNK)
    return _rank(tl.max(tl.load(summary.chunk_max + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))))
