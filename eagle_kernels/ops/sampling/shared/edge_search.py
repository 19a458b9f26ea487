"""Filters by reading the row again, where the tokens that were gathered of it are not enough (see `filters.py`).

An edge is searched for three bits of the float at a time: each pass over the row counts, or weighs, the tokens that
reach eight ranks at once. That makes up to eleven passes a filter; blocks that cannot reach an edge are passed over.

To draw, no edge of top-p is needed, only for log-probabilities. The winner among all tokens is the winner among those
that top-p keeps, if it is kept itself, and what lies above it tells. From above a winner that is not kept it is drawn
again. So a nucleus of 95 % takes one draw in 19 rows of 20. A draw reads few tokens (bounds of their noise tell which
groups could have the winner), and what lies above a winner is weighed until the answer is certain.
"""

from __future__ import annotations

from ....primitives.ordering import (
    LOWEST_KEY,
    NO_NOISE,
    bits_value,
    largest_key,
    noisy_key,
    noisy_key_id,
    rank_value,
    unsigned_rank,
)
from ....primitives.random import GROUP, add_group_bound, add_grouped_gumbel, group_words, grouped_words, noise_key
from ....primitives.rows import SMALLEST_NORMAL
from ....runtime.language import tl, triton
from .group_bounds import NO_BOUND, bound_of, may_win, number_bounds
from .logits import load_scaled
from .row_summary import CHUNK, LANES, NEVER, row_mass

# Tokens that are read at once.
_BLOCK = tl.constexpr(2048)
# The same where none is passed over.
_WIDE_BLOCK = tl.constexpr(8192)
# Groups whose bounds are held at once, in lines and columns; of each column one group is looked at in a turn.
_LINES = tl.constexpr(512)
_COLUMNS = tl.constexpr(32)


@triton.jit
def _rank(value):
    """Returns uint32 that order as the values do, 0 for -inf: what cannot be drawn reaches no edge above 0."""
    return tl.where(value == float("-inf"), 0, unsigned_rank(value))


@triton.jit
def search_row(row, filters, summary, noise, largest, HAS_LOGPROBS: tl.constexpr):
    """Draws a token int32 from what the filters keep of a row; returns it and, with HAS_LOGPROBS, the kept sum."""
    lowest = tl.full([], 0x00800000, tl.uint32)  # the rank of the lowest finite value
    above = unsigned_rank(largest) + 1
    edge = lowest
    if filters.top_k > 0:
        wanted = filters.top_k.to(tl.float32)
        edge = _search_edge(row, summary, largest, edge, above, wanted, False)
    least = tl.full([], float("-inf"), tl.float32)  # of the tokens that top-p is a share of
    mass = tl.zeros([], tl.float32)
    wanted = tl.zeros([], tl.float32)
    if filters.top_p < 1.0:
        if filters.is_of_all:
            mass = row_mass(summary.chunk_max, summary.chunk_sum, largest, row.VOCAB_SIZE)
        else:
            least = rank_value(edge)
            mass = _mass(row, summary, largest, edge, 0.0)
        # the most likely token weighs 1 and always stays, also for top_p = 0
        wanted = tl.maximum(mass * filters.top_p, SMALLEST_NORMAL)

    min_weight = tl.where(filters.min_p > 0.0, tl.minimum(filters.min_p, 1.0), 0.0)
    first_edge = edge
    token = tl.zeros([], tl.int32)
    is_open = above > edge  # the most likely token reaches every edge
    while is_open:
        token = _winner(row, summary, largest, noise, edge, min_weight)
        value = load_scaled(row, token, token < row.VOCAB_SIZE)
        rank = _rank(value)
        # the token reaches the edge, as one does; if none did, the loop would not end
        is_open = (filters.top_p < 1.0) & (rank >= edge) & (rank + 1 < above)
        edge = rank + 1
        if is_open:  # what weighs as much as is wanted lies above the token, which is not kept then
            is_open = _outweighs(row, largest, least, value, mass, wanted)
    kept = tl.zeros([], tl.float32)
    if HAS_LOGPROBS:
        if filters.top_p < 1.0:
            edge = _search_edge(row, summary, largest, lowest, above, wanted, True)
            first_edge = tl.maximum(first_edge, edge)
        kept = _mass(row, summary, largest, first_edge, min_weight)
    return token, kept


@triton.jit
def _winner(row, summary, largest, noise, edge, min_weight):
    """Draws a token int32 from those that reach a rank and weigh `min_weight`, of which there is one at least.
    The bounds of all groups are computed from what the scan has kept, without reading a logit. In each turn the group
    with the largest bound of each column is looked at, if it could win, until no group left could."""
    NUM_GROUPS: tl.constexpr = (row.VOCAB_SIZE + GROUP - 1) // GROUP
    key = noise_key(noise)
    line = tl.arange(0, _LINES)[:, None]
    column = tl.arange(0, _COLUMNS)
    lane = tl.arange(0, GROUP)[None, :]
    best = noisy_key(tl.full([], float("-inf"), tl.float32), NO_NOISE, tl.zeros([], tl.int32))
    for start in range(0, NUM_GROUPS, _LINES * _COLUMNS):
        group = start + line * _COLUMNS + column[None, :]
        # the scan keeps one maximum of several groups
        shared = summary.group_rank + group // (LANES // GROUP)
        group_max = bits_value(tl.load(shared, mask=group < NUM_GROUPS, other=NEVER))
        bounds = number_bounds(add_group_bound(group_max, 1.0, group_words(key, group)), line, _LINES)
        bounds = tl.where(_rank(group_max) >= edge, bounds, NO_BOUND)
        top = tl.max(bounds, axis=0)
        while may_win(bound_of(tl.max(top), _LINES), best):
            chosen = start + (top & (_LINES - 1)) * _COLUMNS + column
            token = chosen[:, None] * GROUP + lane
            is_wanted = may_win(bound_of(top, _LINES), best)[:, None] & (token < row.VOCAB_SIZE)
            value = load_scaled(row, token, is_wanted)
            keep = is_wanted & (_rank(value) >= edge) & (tl.exp(value - largest) >= min_weight)
            noisy, fine = add_grouped_gumbel(value, grouped_words(key, token))
            keys = tl.where(keep, noisy_key(noisy, fine, token), LOWEST_KEY)
            best = tl.maximum(best, largest_key(tl.reshape(keys, [_COLUMNS * GROUP])))
            bounds = tl.where(bounds == top[None, :], NO_BOUND, bounds)
            top = tl.max(bounds, axis=0)
    return noisy_key_id(best)


@triton.jit
def _outweighs(row, largest, least, floor, mass, wanted):
    """Tells whether the tokens above a value weigh `wanted` together; all those of at least `least` weigh `mass`.
    It reads on until the tokens above that it has read weigh `wanted`, or the others weigh too much for that."""
    above = tl.zeros([], tl.float32)
    read = tl.zeros([], tl.float32)
    # what the rounding of sums could hide is left open
    spare = mass - wanted + 1e-4 * mass
    start = tl.zeros([], tl.int32)
    while (start < row.VOCAB_SIZE) & (above < wanted) & (read - above <= spare):
        token = start + tl.arange(0, _WIDE_BLOCK)
        value = load_scaled(row, token, token < row.VOCAB_SIZE)
        weight = tl.where(value >= least, tl.exp(value - largest), 0.0)
        read += tl.sum(weight)
        above += tl.sum(tl.where(value > floor, weight, 0.0))
        start += _WIDE_BLOCK
    return above >= wanted


@triton.jit
def _search_edge(row, summary, largest, low, high, wanted, IS_MASS: tl.constexpr):
    """Returns the largest rank that `wanted` tokens reach, or tokens that weigh `wanted` together."""
    while high - low > 1:
        step = (high - low + 7) // 8
        reaching = _reaching(row, summary, largest, low, step, IS_MASS)
        chosen = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32)) - 1, 0)
        low += chosen.to(tl.uint32) * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _mass(row, summary, largest, low, min_weight):
    """Returns what the tokens that reach a rank and weigh `min_weight` weigh together, fp32."""
    weights = tl.zeros([_BLOCK], tl.float32)
    for start in range(0, row.VOCAB_SIZE, _BLOCK):
        if _chunk_rank(summary, start, row.VOCAB_SIZE) >= low:
            token = start + tl.arange(0, _BLOCK)
            value = load_scaled(row, token, token < row.VOCAB_SIZE)
            weight = tl.exp(value - largest)
            keep = (_rank(value) >= low) & (weight >= min_weight)
            weights += tl.where(keep, weight, 0.0)
    return tl.sum(weights)


@triton.jit
def _reaching(row, summary, largest, low, step, IS_MASS: tl.constexpr):
    """Returns how many tokens, or what weight of them, reach each of the ranks low, low + step, ...: fp32 [8]."""
    threshold = low + tl.arange(0, 8).to(tl.uint32) * step
    counts = tl.zeros([_BLOCK, 8], tl.float32)
    for start in range(0, row.VOCAB_SIZE, _BLOCK):
        if _chunk_rank(summary, start, row.VOCAB_SIZE) >= low:
            token = start + tl.arange(0, _BLOCK)
            value = load_scaled(row, token, token < row.VOCAB_SIZE)
            rank = _rank(value)
            if IS_MASS:
                weight = tl.exp(value - largest)
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
