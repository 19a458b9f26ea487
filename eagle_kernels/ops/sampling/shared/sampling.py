"""Drawing one token from one row of logits: filters by exact edges, then the Gumbel-max trick.

argmax over the kept tokens of (logit / temperature + Gumbel noise) is a sample of their renormalised softmax (Gumbel
1954; Maddison et al., arXiv 1411.0030), so no probabilities are written and nothing is sorted. A row is drawn in two
steps. Many programs scan a slice each (`scan_slice`): of a row without filters they keep the winner of the slice, of
a row with filters what `filters.py` needs. Then one program draws (`draw_token`).

Every op that samples uses these two with the same tuning: equal logits give equal tokens whichever op draws them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ....primitives.ordering import LOWEST_KEY, NO_NOISE, comparable, largest_key, noisy_key, noisy_key_id, ordered_bits
from ....primitives.random import (
    GROUP,
    LARGEST_GUMBEL,
    add_group_bound,
    add_grouped_gumbel,
    group_words,
    grouped_words,
    noise_key,
)
from ....primitives.rows import LARGEST_FINITE
from ....runtime import check, tuning
from ....runtime.language import next_power_of_2, tl, triton
from . import logits
from .filters import MAX_TOKENS, NUM_TOKENS_GATHERED, draw_filtered
from .group_bounds import NO_BOUND, bound_of, may_win, number_bounds
from .logits import load_processed, load_raw, load_scaled
from .row_summary import CHUNK, CHUNK_SIZE, LANES, NUM_LANES, Summary, row_mass, scan_filtered

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/verify_tree_sampled.txt
SCAN_TUNING = {"default": {"BLOCK_CHUNK": 4, "num_warps": 1}}
FILTERED_SCAN_TUNING = {"default": {"BLOCK_CHUNK": 4, "num_warps": 4}}
DRAW_TUNING = {"default": {"num_warps": 8}}


class Scratch(NamedTuple):
    """Pointers to what scanning keeps of all rows; see `allocate_scratch`. None: not needed."""

    keys: Any
    summary: Any
    raw: Any
    gathered: Any


class Share(NamedTuple):
    """Where one row has its share of the scratch."""

    scratch: Any
    key_place: Any  # of the slice keys
    place: Any  # of all else


class Found(NamedTuple):
    """The largest key that any slice of a row has found so far, so that slices that cannot win end early."""

    key: Any  # pointer to it, LOWEST_KEY before the programs of the row start; None: they do not tell each other
    is_told: Any  # whether it may be used


@triton.jit
def scan_slice(
    row, is_sampled, filters, noise, share, found, part, HAS_FILTERS: tl.constexpr, BLOCK_CHUNK: tl.constexpr
):
    """Scans slice `part` of a row and keeps what it finds in its share of the scratch.
    A slice's key is its own largest one, or one that cannot win either way."""
    HAS_LOGPROBS: tl.constexpr = share.scratch.raw is not None
    is_plain = not HAS_FILTERS
    if HAS_FILTERS:
        is_plain = ~filters.is_on
    if is_plain:
        key = _slice_winner(row, is_sampled, noise, part, found, BLOCK_CHUNK)
        store_slice_key(share.scratch.keys, share.key_place, part, key, row.VOCAB_SIZE, BLOCK_CHUNK)
    if HAS_FILTERS or HAS_LOGPROBS:
        if HAS_LOGPROBS or (not is_plain):
            summary = open_summary(share, row.VOCAB_SIZE)
            needs_sums = filters.is_of_all | HAS_LOGPROBS
            scan_filtered(row, summary, part, needs_sums, HAS_LOGPROBS, BLOCK_CHUNK)


@triton.jit
def draw_token(row, filters, noise, share, HAS_FILTERS: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """Draws the token int32 of a scanned row; returns it and its log-probabilities, processed and raw, else NaN.
    NaN logits count as -inf, ties of greedy rows go to the lowest id, a row of nothing but -inf gives token 0."""
    HAS_LOGPROBS: tl.constexpr = share.scratch.raw is not None
    token = tl.zeros([], tl.int32)
    log_mass = tl.zeros([], tl.float32)
    is_plain = not HAS_FILTERS
    if HAS_FILTERS:
        is_plain = ~filters.is_on
        if filters.is_on:
            summary = open_summary(share, row.VOCAB_SIZE)
            token, log_mass = draw_filtered(row, filters, summary, noise, HAS_LOGPROBS)
    if is_plain:
        token = row_winner(share.scratch.keys, share.key_place, row.VOCAB_SIZE, BLOCK_CHUNK)
        if HAS_LOGPROBS:
            summary = open_summary(share, row.VOCAB_SIZE)
            log_mass = _log_mass(summary.chunk_max, summary.chunk_sum, row.VOCAB_SIZE)
    logprob = tl.full([], float("nan"), tl.float32)
    raw_logprob = tl.full([], float("nan"), tl.float32)
    if HAS_LOGPROBS:
        summary = open_summary(share, row.VOCAB_SIZE)
        logprob = _difference(load_scaled(row, token, token < row.VOCAB_SIZE), log_mass)
        raw_mass = _log_mass(summary.raw_max, summary.raw_sum, row.VOCAB_SIZE)
        raw_logprob = _difference(load_raw(row, token, token < row.VOCAB_SIZE), raw_mass)
    return token, logprob, raw_logprob


@triton.jit
def open_summary(share, VOCAB_SIZE: tl.constexpr):
    """Returns the Summary of a row: its share of the scratch."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    groups = share.scratch.summary + share.place * (NUM_CHUNKS * (LANES + 2))
    chunk_max = groups + NUM_CHUNKS * LANES
    raw_max = chunk_max
    if share.scratch.raw is not None:
        raw_max = share.scratch.raw + share.place * (NUM_CHUNKS * 2)
    # values and ids [MAX_TOKENS] each
    gathered = share.scratch.gathered + share.place * (2 * MAX_TOKENS)
    group_rank = groups.to(tl.pointer_type(tl.int32), bitcast=True)
    ids = (gathered + MAX_TOKENS).to(tl.pointer_type(tl.int32), bitcast=True)
    return Summary(group_rank, chunk_max, chunk_max + NUM_CHUNKS, raw_max, raw_max + NUM_CHUNKS, gathered, ids)


@triton.jit
def store_slice_key(keys_ptr, key_place, part, key, VOCAB_SIZE: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """Keeps the key of slice `part` of a row for `row_winner`; LOWEST_KEY is that of a slice that was not read."""
    NUM_SLICES: tl.constexpr = (VOCAB_SIZE + BLOCK_CHUNK * CHUNK - 1) // (BLOCK_CHUNK * CHUNK)
    tl.store(keys_ptr + key_place * NUM_SLICES + part, key)


@triton.jit
def row_winner(keys_ptr, key_place, VOCAB_SIZE: tl.constexpr, BLOCK_CHUNK: tl.constexpr, mask=None):
    """Returns the ids int32 of the largest slice keys of rows; key_place is a scalar, or [n] with a mask [n]."""
    NUM_SLICES: tl.constexpr = (VOCAB_SIZE + BLOCK_CHUNK * CHUNK - 1) // (BLOCK_CHUNK * CHUNK)
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    if mask is None:
        keys = tl.load(keys_ptr + key_place * NUM_SLICES + slices, mask=slices < NUM_SLICES, other=LOWEST_KEY)
        best = largest_key(keys)
    else:
        is_key = mask[:, None] & (slices < NUM_SLICES)[None, :]
        offset = key_place[:, None] * NUM_SLICES + slices[None, :]
        best = tl.max(tl.load(keys_ptr + offset, mask=is_key, other=LOWEST_KEY), axis=1)
    return noisy_key_id(best)


@triton.jit
def _slice_winner(row, is_sampled, noise, part, found, BLOCK_CHUNK: tl.constexpr):
    """Returns the noisy key of the largest noisy logit of a slice; greedy rows have no noise.
    Of all tokens only the maximum of each group of eight is taken; what is looked at in full are the groups that could
    have the winner. A tile draws no noise if none of its tokens could win with the largest possible one. A slice of
    nothing but -inf gives its first token."""
    TILE: tl.constexpr = (BLOCK_CHUNK if BLOCK_CHUNK < 4 else 4) * CHUNK
    first = part * (BLOCK_CHUNK * CHUNK)
    token = first + tl.arange(0, TILE)
    best = noisy_key(tl.full([], float("-inf"), tl.float32), NO_NOISE, first)
    logit = load_processed(row, token, token < row.VOCAB_SIZE)
    key = noise_key(noise)
    for index in tl.static_range(BLOCK_CHUNK * CHUNK // TILE):
        # a maximum passes NaN over where it can
        group_max = tl.max(tl.reshape(logit, [TILE // GROUP, GROUP]), axis=1)
        group_max = tl.where(group_max == group_max, group_max, float("-inf"))
        if (index + 1) * TILE < BLOCK_CHUNK * CHUNK:  # read while this tile is computed
            token += TILE
            logit = load_processed(row, token, token < row.VOCAB_SIZE)
        if is_sampled:
            is_open = True
            if index > 0:
                is_open = may_win(tl.max(group_max) * row.inverse_temperature + LARGEST_GUMBEL, best)
            if is_open:
                best = _best_with_noise(row, key, group_max, first, best, found)
        else:
            best = tl.maximum(best, _largest_logit(row, group_max, first))
        first += TILE
    return best


@triton.jit
def _largest_logit(row, group_max, first):
    """Returns the noisy key of the largest logit of the groups from token `first` on, without noise."""
    NUM_GROUPS: tl.constexpr = group_max.shape[0]
    bits = ordered_bits(tl.minimum(comparable(group_max), LARGEST_FINITE))
    group = tl.min(tl.where(bits == tl.max(bits), tl.arange(0, NUM_GROUPS), NUM_GROUPS))
    token = first + group * GROUP + tl.arange(0, GROUP)
    value = load_scaled(row, token, token < row.VOCAB_SIZE)
    return tl.max(noisy_key(value, NO_NOISE, token))


@triton.jit
def _best_with_noise(row, key, group_max, first, best, found):
    """Returns the largest of `best` and the noisy keys of the groups from token `first` on.
    In each turn 32 tokens are looked at: of each quarter of the groups the one with the largest bound, until no bound
    of those left reaches the best key. One group of a flat slice has to be, of others three to five: one turn, or two,
    in a few of a thousand slices ten, which what other slices have found cuts short."""
    NUM_GROUPS: tl.constexpr = group_max.shape[0]
    group = tl.arange(0, NUM_GROUPS)
    bound = add_group_bound(group_max, row.inverse_temperature, group_words(key, first // GROUP + group))
    bounds = number_bounds(bound, group, NUM_GROUPS)
    is_open = may_win(bound_of(tl.max(bounds), NUM_GROUPS), best)
    lane = tl.arange(0, 32)
    while is_open:
        chosen = tl.zeros([32], tl.int32)
        for quarter in tl.static_range(4):
            is_own = group // (NUM_GROUPS // 4) == quarter
            top = tl.max(tl.where(is_own, bounds, NO_BOUND))
            chosen = tl.where(lane // GROUP == quarter, top & (NUM_GROUPS - 1), chosen)
            bounds = tl.where(is_own & (bounds == top), NO_BOUND, bounds)
        token = first + chosen * GROUP + lane % GROUP
        value = load_scaled(row, token, token < row.VOCAB_SIZE)
        value, fine = add_grouped_gumbel(value, grouped_words(key, token))
        best = tl.maximum(best, largest_key(noisy_key(value, fine, token)))
        top_bound = bound_of(tl.max(bounds), NUM_GROUPS)
        is_open = may_win(top_bound, best)
        if found.key is not None:
            if found.is_told:
                found_before = tl.atomic_max(found.key, best, sem="relaxed")
                if is_open:  # else there is no waiting for the answer
                    is_open = may_win(top_bound, tl.maximum(best, found_before))
    return best


@triton.jit
def _log_mass(max_ptr, sum_ptr, VOCAB_SIZE: tl.constexpr):
    """Returns the log of a row's sum of exponentials, from the maxima and sums of its chunks."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    BLOCK_CHUNK: tl.constexpr = next_power_of_2(NUM_CHUNKS)
    chunk = tl.arange(0, BLOCK_CHUNK if BLOCK_CHUNK > LANES else LANES)
    largest = tl.max(tl.load(max_ptr + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf")))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return shift + tl.log(row_mass(max_ptr, sum_ptr, shift, VOCAB_SIZE))


@triton.jit
def _difference(value, log_mass):
    """Returns value - log_mass, and -inf where both are."""
    return tl.where(value == float("-inf"), float("-inf"), value - log_mass)


def check_parameters(args: check.Arguments, axis: str) -> None:
    """Checks seeds, temperature and the filters, one of each per row of `axis`."""
    args.tensor("seeds", (axis,), check.INTEGER)
    args.tensor("temperature", (axis,), (torch.float32,))
    args.tensor("top_k", (axis,), check.INTEGER, optional=True)
    args.tensor("top_p", (axis,), (torch.float32,), optional=True)
    args.tensor("min_p", (axis,), (torch.float32,), optional=True)
    args.debug_numbers("temperature", 0)
    args.debug_numbers("top_p")
    args.debug_numbers("min_p")
    args.choice("filter_order", FILTER_ORDERS)


FILTER_ORDERS = ("top_k_first", "joint")


def has_filters(values: dict) -> bool:
    """Tells whether any filter is given."""
    return any(values[name] is not None for name in ("top_k", "top_p", "min_p"))


def _needs_summary(values: dict) -> bool:
    return has_filters(values) or values.get("return_logprobs", False)


def allocate_scratch(values: dict, rows: torch.Tensor, num_places: int, num_levels: int = 1) -> Scratch:
    """Allocates what scanning keeps of the rows (see `open_summary`).
    keys int64 [num_levels * num_places, slices]; with filters or log-probabilities summary fp32 [num_places, chunks *
    34] (group maxima, chunk maxima, chunk sums) and gathered fp32 [num_places, 512]; with log-probabilities raw fp32
    [num_places, chunks * 2] (chunk maxima and sums of the logits as the model gave them)."""
    num_chunks = -(-rows.shape[1] // CHUNK_SIZE)

    def allocate(is_needed: bool, width: int):
        return torch.empty((num_places, width), dtype=torch.float32, device=rows.device) if is_needed else None

    return Scratch(
        torch.empty((num_levels * num_places, num_slices(values, rows)), dtype=torch.int64, device=rows.device),
        allocate(_needs_summary(values), num_chunks * (NUM_LANES + 2)),
        allocate(values.get("return_logprobs", False), num_chunks * 2),
        allocate(_needs_summary(values), 2 * NUM_TOKENS_GATHERED),
    )


def constants(values: dict, rows: torch.Tensor) -> dict:
    """Returns the kernel arguments that scanning and drawing share."""
    return {
        "VOCAB_SIZE": rows.shape[1], "HAS_FILTERS": has_filters(values), "HAS_PENALTIES": logits.has_penalties(values),
        "IS_JOINT": values["filter_order"] == "joint", "BLOCK_CHUNK": scan_tuning(values, rows.device)["BLOCK_CHUNK"],
        "ALIGNMENT": math.gcd(rows.stride(0), 16),  # a divisor of every row's offset, so that loads can be wide
    }  # fmt: skip


def scan_tuning(values: dict, device: torch.device) -> dict:
    """Returns the tuning row of scanning."""
    return tuning.row(FILTERED_SCAN_TUNING if _needs_summary(values) else SCAN_TUNING, device)


def num_slices(values: dict, rows: torch.Tensor) -> int:
    """Returns the number of programs that scan one row."""
    return -(-rows.shape[1] // (scan_tuning(values, rows.device)["BLOCK_CHUNK"] * CHUNK_SIZE))
