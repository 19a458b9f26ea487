"""Filters by reading the row again, where the tokens that were gathered of it are not enough (see `filters.py`).

An edge is searched for three bits of the float at a time: each pass over the row counts, or weighs, the tokens that
reach eight ranks at once, until only one value is left. That makes up to eleven passes a filter, and about six for rows
of 16 bits; blocks that cannot reach an edge are passed over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY, noisy_key, noisy_key_id, unsigned_rank
from ....runtime.language import tl, triton
from .logits import load_scaled
from .random import add_grouped_gumbel, grouped_words, noise_key
from .row_summary import CHUNK, row_mass

# Tokens of a tile, of which _NUM_TILES, a block, are asked for at once: a program has no other to wait with.
_TILE = tl.constexpr(2048)
_NUM_TILES = tl.constexpr(2)
_BLOCK = tl.constexpr(4096)
# blocks whose maxima are compared with an edge at once
_NUM_BLOCKS = tl.constexpr(32)
# ranks that a pass counts at once, and neighbours that a thread adds up by itself
_RANKS = tl.constexpr(8)
_NEIGHBOURS = tl.constexpr(8)
_HIGHEST = tl.constexpr(0xFFFFFFFF)


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
def search_row(row, filters, summary, noise, largest, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr):
    """Draws a token int32 from what the filters keep of a row; returns it and the kept sum of exponentials."""
    scanned = _Scanned(row, summary, largest)
    above = unsigned_rank(largest) + 1
    edge = tl.full([], 1, tl.uint32)
    if filters.top_k > 0:
        wanted = filters.top_k.to(tl.float32)
        edge = _search_edge(scanned, edge, above, wanted, VOCAB_SIZE, HAS_PENALTIES, False)
    if filters.top_p < 1.0:
        if filters.is_of_all:
            mass = row_mass(summary.chunk_max, summary.chunk_sum, largest, VOCAB_SIZE)
        else:
            _, mass, _, _ = _pass(scanned, edge, above, edge * 0, 0.0, VOCAB_SIZE, HAS_PENALTIES, True)
        # the most likely token weighs 1 and always stays, also for top_p = 0
        wanted = tl.maximum(mass * filters.top_p, 1.1754943508222875e-38)
        lowest = tl.full([], 1, tl.uint32)
        by_mass = _search_edge(scanned, lowest, above, wanted, VOCAB_SIZE, HAS_PENALTIES, True)
        edge = tl.maximum(edge, by_mass)

    key = noise_key(noise)
    best = tl.full([_TILE], LOWEST_KEY, tl.int64)
    kept = tl.zeros([_TILE], tl.float32)
    for first in range(0, VOCAB_SIZE, _NUM_BLOCKS * _BLOCK):
        blocks = _blocks_that_reach(summary, first, edge, VOCAB_SIZE)
        for start in range(first, tl.minimum(first + _NUM_BLOCKS * _BLOCK, VOCAB_SIZE), _BLOCK):
            if (blocks >> ((start - first) // _BLOCK)) & 1 > 0:
                values = _load_block(row, start, VOCAB_SIZE, HAS_PENALTIES)
                for tile in tl.static_range(_NUM_TILES):
                    token = start + tile * _TILE + tl.arange(0, _TILE)
                    value = values[tile]
                    weight = tl.exp(value - largest)
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
    """Returns a rank that `wanted` tokens reach, or tokens that weigh `wanted` together: the largest one, or one below
    it that no more tokens reach."""
    while high - low > 1:
        step = (high - low + _RANKS - 1) // _RANKS
        num_reached, _, smallest, largest = _pass(scanned, low, high, step, wanted, VOCAB_SIZE, HAS_PENALTIES, IS_MASS)
        low += tl.maximum(num_reached - 1, 0).to(tl.uint32) * step
        high = tl.minimum(high, low + step)
        high = tl.where(smallest >= largest, low, high)  # no other value is left
    return low


@triton.jit
def _pass(
    scanned, low, high, step, wanted, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr, IS_MASS: tl.constexpr
):
    """Returns how many of the ranks low, low + step, ... are reached by `wanted` tokens, or by tokens of that weight;
    how many tokens, or what weight, reach `low`; and the smallest and the largest rank in low .. high - 1."""
    # one tensor for each rank: tokens times ranks in one would not fit into registers
    counts = ()
    for _ in tl.static_range(_RANKS):
        counts += (tl.zeros([_TILE // _NEIGHBOURS], tl.float32),)
    smallest = tl.full([_TILE // _NEIGHBOURS], _HIGHEST, tl.uint32)
    largest = tl.zeros([_TILE // _NEIGHBOURS], tl.uint32)
    for first in range(0, VOCAB_SIZE, _NUM_BLOCKS * _BLOCK):
        blocks = _blocks_that_reach(scanned.summary, first, low, VOCAB_SIZE)
        for start in range(first, tl.minimum(first + _NUM_BLOCKS * _BLOCK, VOCAB_SIZE), _BLOCK):
            if (blocks >> ((start - first) // _BLOCK)) & 1 > 0:
                values = _load_block(scanned.row, start, VOCAB_SIZE, HAS_PENALTIES)
                for tile in tl.static_range(_NUM_TILES):
                    value = tl.reshape(values[tile], [_TILE // _NEIGHBOURS, _NEIGHBOURS])
                    weight = tl.full(value.shape, 1.0, tl.float32)
                    if IS_MASS:
                        weight = tl.exp(value - scanned.largest)
                    rank, more = _rank(value), ()
                    for index in tl.static_range(_RANKS):
                        reaches = rank >= low + index * step
                        more += (counts[index] + tl.sum(tl.where(reaches, weight, 0.0), axis=1),)
                    counts = more
                    is_open = (rank >= low) & (rank < high)
                    smallest = tl.minimum(smallest, tl.min(tl.where(is_open, rank, _HIGHEST), axis=1))
                    largest = tl.maximum(largest, tl.max(tl.where(is_open, rank, 0), axis=1))
    num_reached = tl.zeros([], tl.int32)
    for index in tl.static_range(_RANKS):
        num_reached += (tl.sum(counts[index]) >= wanted).to(tl.int32)
    return num_reached, tl.sum(counts[0]), tl.min(smallest), tl.max(largest)


@triton.jit
def _blocks_that_reach(summary, first, edge, VOCAB_SIZE: tl.constexpr):
    """Returns bits int64: of the blocks from token `first` on, those whose largest value reaches the edge."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    block = tl.arange(0, _NUM_BLOCKS)
    chunk = first // CHUNK + block[:, None] * (_BLOCK // CHUNK) + tl.arange(0, _BLOCK // CHUNK)[None, :]
    maxima = tl.load(summary.chunk_max + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    return tl.sum((_rank(tl.max(maxima, axis=1)) >= edge).to(tl.int64) << block)


@triton.jit
def _load_block(row, start, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr):
    """Returns _NUM_TILES tiles [_TILE] of scaled logits, of the tokens from `start` on."""
    values = ()
    for tile in tl.static_range(_NUM_TILES):
        token = start + tile * _TILE + tl.arange(0, _TILE)
        values += (load_scaled(row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES),)
    return values
