"""Top-k, top-p and min-p on one long row of scaled logits, exactly and without sorting it.

The row is read once by many programs, which keep its maxima and sums (`scan_filtered` in `row_summary.py`). One program
then draws (`draw_filtered`):

* a value that WANTED groups reach lies at or below the WANTED-th largest logit, so the tokens that the filters ask for
  are among those that reach it. By the chunks' maxima such a value is found that few more groups reach. Their tokens
  are gathered, and each is compared with each: how many lie above it, and how much probability;
* if they are not enough to tell (a nucleus of thousands of tokens, k above MAX_TOP_K, hundreds of equal logits), the
  edge is searched for in the whole row, and a token that top-p keeps without its edge (`edge_search.py`).

The tokens that a filter keeps are those at or above an edge: tokens that tie with it all stay. A token stays in top-k
if fewer than k lie above it, in top-p if the tokens above it hold less than top_p of the probability, in min-p if it is
at least min_p times as likely as the most likely one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY, halfway, noisy_key, noisy_key_id, ordered_bits
from ....primitives.random import add_grouped_gumbel, grouped_words, noise_key
from ....runtime.language import next_power_of_2, tl, triton
from .edge_search import search_row
from .logits import load_scaled
from .row_summary import CHUNK, LANES, NEVER, row_mass

# The largest k for which tokens are gathered, and the room for them.
MAX_TOP_K = tl.constexpr(128)
NUM_GROUPS_GATHERED = 128
NUM_TOKENS_GATHERED = 256
MAX_GROUPS = tl.constexpr(NUM_GROUPS_GATHERED)
MAX_TOKENS = tl.constexpr(NUM_TOKENS_GATHERED)
# How many tokens are gathered where top-k does not tell.
DEFAULT_WANTED = tl.constexpr(64)


class Filters(NamedTuple):
    """The filters of one row, whether any of them removes anything, and whether top-p is a share of all tokens."""

    top_k: Any
    top_p: Any
    min_p: Any
    is_on: Any
    is_of_all: Any


class FilterPointers(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    top_k: Any
    top_p: Any
    min_p: Any


@triton.jit
def load_filters(filters, request, is_sampled, VOCAB_SIZE: tl.constexpr, IS_JOINT: tl.constexpr):
    """Loads the Filters of a request, given the FilterPointers."""
    top_k = tl.zeros([], tl.int32)
    top_p = tl.full([], 1.0, tl.float32)
    min_p = tl.zeros([], tl.float32)
    if filters.top_k is not None:
        wide = tl.load(filters.top_k + request).to(tl.int64)
        top_k = tl.where((wide > 0) & (wide < VOCAB_SIZE), wide, 0).to(tl.int32)
    if filters.top_p is not None:
        top_p = tl.load(filters.top_p + request)
    if filters.min_p is not None:
        min_p = tl.load(filters.min_p + request)
    is_on = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return Filters(top_k, top_p, min_p, is_on, (top_k == 0) | IS_JOINT)


@triton.jit
def draw_filtered(row, filters, summary, noise, HAS_LOGPROBS: tl.constexpr):
    """Draws a token int32 from what the filters keep of a row; a row of nothing but -inf gives token 0. Returns it and,
    with HAS_LOGPROBS, the log of the kept sum of exponentials. The time goes to the exchange between warps, each step
    of which waits for the one before. So tiles of what is gathered are [LANES, _]: a warp holds whole columns, a lane
    one value of each, and counts without the other warps."""
    NUM_CHUNKS: tl.constexpr = (row.VOCAB_SIZE + CHUNK - 1) // CHUNK
    MOST_CHUNKS: tl.constexpr = next_power_of_2(NUM_CHUNKS)
    BLOCK_CHUNK: tl.constexpr = MOST_CHUNKS if MOST_CHUNKS > LANES else LANES
    lane = tl.arange(0, LANES)
    # no alignment: the compiler gives each lane one value and no vector
    group = tl.multiple_of(tl.arange(0, BLOCK_CHUNK)[None, :] * LANES + lane[:, None], [1, 1])
    group_rank = tl.load(summary.group_rank + group, mask=group < NUM_CHUNKS * LANES, other=NEVER)
    has_top_k = filters.top_k > 0
    wanted = tl.where(has_top_k, filters.top_k, DEFAULT_WANTED)
    num_maxima, smallest, largest, total = _chunk_maxima(summary, NUM_CHUNKS, BLOCK_CHUNK)
    shift = tl.where(largest == float("-inf"), 0.0, largest)

    # a value that at least `wanted` tokens reach, and few groups: every chunk reaches the smallest maximum, with too
    # many groups; about half of them reach the mean of all but the largest, with about the wanted number of groups
    low, high = tl.where(wanted <= num_maxima, ordered_bits(smallest), NEVER + 1), ordered_bits(largest)
    mean = (total - largest) / tl.maximum(num_maxima - 1, 1)
    probe = tl.minimum(tl.maximum(ordered_bits(mean), low), high)
    is_reached = tl.sum(tl.sum((group_rank >= probe).to(tl.int32), axis=0)) >= wanted
    low, high = tl.where(is_reached, probe, low), tl.where(is_reached, high, probe)
    low, num_groups, slot = _raise_edge(group_rank, low, high, wanted, MAX_GROUPS)
    is_enough = (wanted <= MAX_TOP_K) & (num_groups <= MAX_GROUPS) & (largest > float("-inf"))
    num_tokens = tl.zeros([], tl.int32)
    if is_enough:
        tl.store(summary.gathered_ids + slot, group, mask=group_rank >= low)
        tl.debug_barrier()
        column = tl.arange(0, MAX_GROUPS)
        gathered = tl.load(summary.gathered_ids + column, mask=column < num_groups, other=0)
        token = tl.multiple_of(gathered[None, :] * LANES + lane[:, None], [1, 1])
        is_token = (column < num_groups)[None, :] & (token < row.VOCAB_SIZE)
        value = load_scaled(row, token, is_token)
        rank = ordered_bits(value)
        token_low, num_tokens, place = _raise_edge(rank, low, high, wanted, MAX_TOKENS)
        is_enough = num_tokens <= MAX_TOKENS
        is_wanted = (rank >= token_low) & is_enough
        tl.debug_barrier()  # all groups have been read
        tl.store(summary.gathered_ids + place, token, mask=is_wanted)
        tl.store(summary.gathered_values + place, value, mask=is_wanted)
        tl.debug_barrier()

    chosen = tl.zeros([], tl.int32)
    kept_sum = tl.zeros([], tl.float32)
    if is_enough:
        if num_tokens <= MAX_TOKENS // 2:
            chosen, kept_sum, is_enough = _draw_gathered(
                row, filters, summary, noise, num_tokens, shift, HAS_LOGPROBS, MAX_TOKENS // 2
            )
        else:
            chosen, kept_sum, is_enough = _draw_gathered(
                row, filters, summary, noise, num_tokens, shift, HAS_LOGPROBS, MAX_TOKENS
            )
    if (not is_enough) & (largest > float("-inf")):
        chosen, kept_sum = search_row(row, filters, summary, noise, largest, HAS_LOGPROBS)
    return tl.where(largest > float("-inf"), chosen, 0), shift + tl.log(kept_sum)


@triton.jit
def _chunk_maxima(summary, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """Returns how many chunk maxima are above -inf, the smallest and the largest of them, and their sum.
    Where none is above -inf, the largest is -inf."""
    chunk = tl.arange(0, BLOCK_CHUNK)
    chunk_max = tl.load(summary.chunk_max + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    is_one = chunk_max > float("-inf")
    smallest, total = tl.where(is_one, chunk_max, float("inf")), tl.where(is_one, chunk_max, 0.0)
    return tl.reduce((is_one.to(tl.int32), smallest, chunk_max, total), 0, _merge_maxima)


@triton.jit
def _merge_maxima(number, smallest, largest, total, other_number, other_smallest, other_largest, other_total):
    smallest, largest = tl.minimum(smallest, other_smallest), tl.maximum(largest, other_largest)
    return number + other_number, smallest, largest, total + other_total


@triton.jit
def _raise_edge(rank, low, high, wanted, ROOM: tl.constexpr):
    """Raises `low` while more than ROOM of rank [LANES, n] reach it, as long as at least `wanted` do.
    Returns `low`, how many reach it, and the place of each that does among them. `high` is the largest rank."""
    in_column, running = _count(rank >= low)
    count = tl.sum(in_column)
    if count > ROOM:
        middle = halfway(low, high)
        while (count > ROOM) & (middle > low):
            above = tl.sum(tl.sum((rank >= middle).to(tl.int32), axis=0))
            low = tl.where(above >= wanted, middle, low)
            count = tl.where(above >= wanted, above, count)
            high = tl.where(above >= wanted, high, middle)
            middle = halfway(low, high)
        in_column, running = _count(rank >= low)
    before = tl.cumsum(in_column, 0) - in_column
    return low, count, before[None, :] + running - 1


@triton.jit
def _count(flags):
    """Counts the set flags [LANES, n] of each column: int32 [n] of the whole column, [LANES, n] up to each flag.
    A column's count needs one byte, so the lanes exchange words of four columns."""
    NUM_COLUMNS: tl.constexpr = flags.shape[1]
    flags = tl.reshape(flags.to(tl.int32), [LANES, 4, NUM_COLUMNS // 4])
    place = (tl.arange(0, 4) * 8)[None, :, None]
    words = tl.sum(flags << place, axis=1, keep_dims=True)
    running = (tl.cumsum(words, 0) >> place) & 0xFF
    in_column = (tl.sum(words, axis=0, keep_dims=True) >> place) & 0xFF
    return tl.reshape(in_column, [NUM_COLUMNS]), tl.reshape(running, [LANES, NUM_COLUMNS])


@triton.jit
def _draw_gathered(row, filters, summary, noise, num_tokens, shift, HAS_LOGPROBS: tl.constexpr, ROOM: tl.constexpr):
    """Returns the token drawn from the gathered ones, the weight of those that the filters keep, and whether the
    gathered ones were enough to tell."""
    place = tl.arange(0, ROOM)
    is_token = place < num_tokens
    token = tl.load(summary.gathered_ids + place, mask=is_token, other=0)
    value = tl.load(summary.gathered_values + place, mask=is_token, other=float("-inf"))
    weight = tl.exp(value - shift)
    num_above, mass_above = _above(summary.gathered_values, num_tokens, shift, ROOM)
    has_top_k = filters.top_k > 0
    keep = is_token & (num_above < tl.where(has_top_k, filters.top_k, MAX_TOKENS))
    if filters.is_of_all:
        mass = row_mass(summary.chunk_max, summary.chunk_sum, shift, row.VOCAB_SIZE)
    else:
        mass = tl.sum(tl.where(keep, weight, 0.0))
    is_enough = has_top_k
    if not has_top_k:
        # the nucleus, or else all that min-p keeps, must lie within what was gathered
        is_enough = (filters.top_p < 1.0) & (tl.sum(weight) >= filters.top_p * mass)
        is_enough |= tl.min(tl.where(is_token, weight, float("inf"))) < filters.min_p
    if filters.top_p < 1.0:
        keep &= (num_above == 0) | (mass_above < filters.top_p * mass)
    if filters.min_p > 0.0:
        keep &= weight >= tl.minimum(filters.min_p, 1.0)
    noisy, fine = add_grouped_gumbel(value, grouped_words(noise_key(noise), token))
    chosen = noisy_key_id(tl.max(tl.where(keep, noisy_key(noisy, fine, token), LOWEST_KEY)))
    kept_sum = tl.zeros([], tl.float32)
    if HAS_LOGPROBS:
        kept_sum = tl.sum(tl.where(keep, weight, 0.0))
    return chosen, kept_sum, is_enough


@triton.jit
def _above(values_ptr, num_values, shift, ROOM: tl.constexpr):
    """Returns how many values lie above each, int32 [ROOM], and the sum of their exponentials relative to `shift`."""
    place = tl.arange(0, ROOM)
    value = tl.load(values_ptr + place, mask=place < num_values, other=float("-inf"))
    num_above = tl.zeros([ROOM, 8], tl.float32)
    mass_above = tl.zeros([ROOM, 8], tl.float32)
    for start in tl.static_range(0, ROOM, 64):
        # [8, ROOM, 8]: eight lanes share what one value is compared with, so there is little to load and to exchange
        other = start + tl.arange(0, 8)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
        other_value = tl.load(values_ptr + other, mask=other < num_values, other=float("-inf"))
        # 0 or 1 as a float, which takes one instruction to make and one to use
        is_above = (other_value > value[None, :, None]).to(tl.float32)
        num_above += tl.sum(is_above, axis=0)
        mass_above += tl.sum(is_above * tl.exp(other_value - shift), axis=0)
    return tl.sum(num_above, axis=1).to(tl.int32), tl.sum(mass_above, axis=1)
