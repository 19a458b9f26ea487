"""Top-k, top-p and min-p on one long row of scaled logits, exactly and without sorting it.

The row is read once by many programs (`scan_filtered`): of every group of LANES tokens they keep the maximum, of every
chunk of LANES groups the maximum and, where top-p is a share of all tokens, the sum of exponentials relative to it. One
program then draws (`draw_filtered`):

* a value that WANTED groups reach lies at or below the WANTED-th largest logit, so the tokens that the filters ask for
  are among those that reach it. By the chunks' maxima such a value is found that few more groups reach. Their tokens
  are gathered, and each is compared with each: how many lie above it, and how much probability;
* if they are not enough to tell (a nucleus of thousands of tokens, k above MAX_TOP_K, hundreds of equal logits), the
  edge is searched for in the whole row, three bits of the float at a time.

The tokens that a filter keeps are those at or above an edge: tokens that tie with it all stay. A token stays in top-k
if fewer than k lie above it, in top-p if the tokens above it hold less than top_p of the probability, in min-p if it is
at least min_p times as likely as the most likely one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY, noisy_key, noisy_key_id, ordered_bits, unsigned_rank
from ....runtime.language import tl, triton
from .logits import load_processed, load_raw, load_scaled, scaled
from .random import add_grouped_gumbel, grouped_words, noise_key

NUM_LANES = 32
LANES = tl.constexpr(NUM_LANES)
CHUNK_SIZE = NUM_LANES * NUM_LANES
CHUNK = tl.constexpr(CHUNK_SIZE)

# The largest k for which tokens are gathered, and the room for them.
MAX_TOP_K = tl.constexpr(128)
NUM_GROUPS_GATHERED = 128
NUM_TOKENS_GATHERED = 256
MAX_GROUPS = tl.constexpr(NUM_GROUPS_GATHERED)
MAX_TOKENS = tl.constexpr(NUM_TOKENS_GATHERED)
# How many tokens are gathered where top-k does not tell.
DEFAULT_WANTED = tl.constexpr(64)

# The ordered bits of -inf, which cannot be drawn.
_NEVER = tl.constexpr(-0x7F800001)


class Filters(NamedTuple):
    """The filters of one row, whether any of them removes anything, and whether top-p is a share of all tokens."""

    top_k: Any
    top_p: Any
    min_p: Any
    is_on: Any
    is_of_all: Any


class Summary(NamedTuple):
    """Pointers to what `scan_filtered` keeps of one row and to the room for what is gathered of it."""

    group_rank: Any  # maxima of groups as ordered bits, int32 [num_chunks * LANES]
    chunk_max: Any  # fp32 [num_chunks]
    chunk_sum: Any
    raw_max: Any  # the same of the logits as the model gave them, if log-probabilities are wanted
    raw_sum: Any
    gathered_values: Any  # fp32 [MAX_TOKENS]
    gathered_ids: Any  # int32 [MAX_TOKENS]


@triton.jit
def load_filters(
    top_k_ptr, top_p_ptr, min_p_ptr, request, is_sampled, VOCAB_SIZE: tl.constexpr, IS_JOINT: tl.constexpr
):
    """The filters of a request; pointers may be None."""
    top_k = tl.zeros([], tl.int32)
    top_p = tl.full([], 1.0, tl.float32)
    min_p = tl.zeros([], tl.float32)
    if top_k_ptr is not None:
        wide = tl.load(top_k_ptr + request).to(tl.int64)
        top_k = tl.where((wide > 0) & (wide < VOCAB_SIZE), wide, 0).to(tl.int32)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + request)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + request)
    is_on = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return Filters(top_k, top_p, min_p, is_on, (top_k == 0) | IS_JOINT)


@triton.jit
def scan_filtered(
    row,
    summary,
    part,
    needs_sums,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
):
    """Writes maxima and, if needed, sums of the chunks of slice `part` of a row.

    Launched with as many warps as BLOCK_CHUNK.
    """
    chunk = part * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    # [BLOCK_CHUNK, CHUNK / WIDTH, WIDTH]: every warp reads chunks of its own, so no maximum and no sum crosses warps
    WIDTH: tl.constexpr = LANES * VECTOR
    offset = tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = chunk[:, None, None] * CHUNK + offset[None, :, :]
    is_token = token < VOCAB_SIZE
    logit = load_processed(row, token, is_token, VOCAB_SIZE, HAS_PENALTIES)
    # scaling keeps the order (but for +inf at an infinite temperature), so of a group only the maximum is scaled
    group_max = tl.max(tl.reshape(logit, [BLOCK_CHUNK, CHUNK // WIDTH, VECTOR, LANES]), axis=3)
    group_max = scaled(row, group_max)
    chunk_max = tl.max(tl.max(group_max, axis=1), axis=1)

    # all from [BLOCK_CHUNK, LANES], where every warp still holds its chunks
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    lane = tl.arange(0, LANES)[None, :]
    chunk = chunk[:, None]
    is_first = (chunk < NUM_CHUNKS) & (lane == 0)
    group_rank = ordered_bits(tl.reshape(group_max, [BLOCK_CHUNK, LANES]))
    tl.store(summary.group_rank + chunk * LANES + lane, group_rank, mask=chunk < NUM_CHUNKS)
    tl.store(summary.chunk_max + chunk + lane, chunk_max[:, None], mask=is_first)
    if needs_sums:
        chunk_sum = _chunk_sum(scaled(row, logit), chunk_max)
        tl.store(summary.chunk_sum + chunk + lane, chunk_sum[:, None], mask=is_first)
    if HAS_LOGPROBS:
        raw = load_raw(row, token, is_token)
        raw_max = tl.max(tl.max(raw, axis=1), axis=1)
        tl.store(summary.raw_max + chunk + lane, raw_max[:, None], mask=is_first)
        tl.store(summary.raw_sum + chunk + lane, _chunk_sum(raw, raw_max)[:, None], mask=is_first)


@triton.jit
def _chunk_sum(value, chunk_max):
    """The sums [chunk] of exponentials of values [chunk, _, _] relative to the chunks' maxima."""
    shift = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    return tl.sum(tl.sum(tl.exp(value - shift[:, None, None]), axis=1), axis=1)


@triton.jit
def row_mass(chunk_max_ptr, chunk_sum_ptr, shift, VOCAB_SIZE: tl.constexpr):
    """A row's sum of exponentials relative to `shift`."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    BLOCK_CHUNK: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
    # triton 3.6 does not compile axes shorter than a warp
    chunk = tl.arange(0, BLOCK_CHUNK if BLOCK_CHUNK > LANES else LANES)
    chunk_max = tl.load(chunk_max_ptr + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + chunk, mask=chunk < NUM_CHUNKS, other=0.0)
    return tl.sum(chunk_sum * tl.exp(chunk_max - shift))


@triton.jit
def draw_filtered(
    row,
    filters,
    summary,
    noise,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    """The token int32 drawn from what the filters keep of a row, and with HAS_LOGPROBS the log of the kept sum of
    exponentials. A row of nothing but -inf gives token 0.

    What bounds this is the exchange between warps, of which every step waits for the one before. So tiles of what is
    gathered are [LANES, _]: a warp holds whole columns, one lane one value, which it counts without the others.
    """
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    MOST_CHUNKS: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
    BLOCK_CHUNK: tl.constexpr = MOST_CHUNKS if MOST_CHUNKS > LANES else LANES
    lane = tl.arange(0, LANES)
    # no alignment: the compiler gives each lane one value and no vector
    group = tl.multiple_of(tl.arange(0, BLOCK_CHUNK)[None, :] * LANES + lane[:, None], [1, 1])
    group_rank = tl.load(summary.group_rank + group, mask=group < NUM_CHUNKS * LANES, other=_NEVER)
    has_top_k = filters.top_k > 0
    wanted = tl.where(has_top_k, filters.top_k, DEFAULT_WANTED)
    num_maxima, smallest, largest, total = _chunk_maxima(summary, NUM_CHUNKS, BLOCK_CHUNK)
    shift = tl.where(largest == float("-inf"), 0.0, largest)

    # a value that at least `wanted` tokens reach, and few groups: every chunk reaches the smallest maximum, with too
    # many groups; about half of them reach the mean of all but the largest, with about as many groups as are wanted
    low, high = tl.where(wanted <= num_maxima, ordered_bits(smallest), _NEVER + 1), ordered_bits(largest)
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
        is_token = (column < num_groups)[None, :] & (token < VOCAB_SIZE)
        value = load_scaled(row, token, is_token, VOCAB_SIZE, HAS_PENALTIES)
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
                filters, summary, noise, num_tokens, shift, VOCAB_SIZE, HAS_LOGPROBS, MAX_TOKENS // 2
            )
        else:
            chosen, kept_sum, is_enough = _draw_gathered(
                filters, summary, noise, num_tokens, shift, VOCAB_SIZE, HAS_LOGPROBS, MAX_TOKENS
            )
    if (not is_enough) & (largest > float("-inf")):
        chosen, kept_sum = _search_row(row, filters, summary, noise, largest, VOCAB_SIZE, HAS_PENALTIES)
    return tl.where(largest > float("-inf"), chosen, 0), shift + tl.log(kept_sum)


@triton.jit
def _chunk_maxima(summary, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """How many chunk maxima are above -inf, the smallest and the largest of them (-inf: there is none), their sum."""
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

    Returns it, how many reach it, and the place of each that does among them. `high` is the largest rank.
    """
    in_column, running = _count(rank >= low)
    count = tl.sum(in_column)
    if count > ROOM:
        middle = _middle(low, high)
        while (count > ROOM) & (middle > low):
            above = tl.sum(tl.sum((rank >= middle).to(tl.int32), axis=0))
            low = tl.where(above >= wanted, middle, low)
            count = tl.where(above >= wanted, above, count)
            high = tl.where(above >= wanted, high, middle)
            middle = _middle(low, high)
        in_column, running = _count(rank >= low)
    before = tl.cumsum(in_column, 0) - in_column
    return low, count, before[None, :] + running - 1


@triton.jit
def _count(flags):
    """How many of flags [LANES, n] are set in each column, int32 [n], and how many up to each in its column [LANES, n].

    A column's count needs one byte: the lanes exchange the words of four columns.
    """
    NUM_COLUMNS: tl.constexpr = flags.shape[1]
    flags = tl.reshape(flags.to(tl.int32), [LANES, 4, NUM_COLUMNS // 4])
    place = (tl.arange(0, 4) * 8)[None, :, None]
    words = tl.sum(flags << place, axis=1, keep_dims=True)
    running = (tl.cumsum(words, 0) >> place) & 0xFF
    in_column = (tl.sum(words, axis=0, keep_dims=True) >> place) & 0xFF
    return tl.reshape(in_column, [NUM_COLUMNS]), tl.reshape(running, [LANES, NUM_COLUMNS])


@triton.jit
def _middle(low, high):
    """The mean of two int32 rounded down, though their sum may be none."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _draw_gathered(
    filters,
    summary,
    noise,
    num_tokens,
    shift,
    VOCAB_SIZE: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The token drawn from the gathered ones, what the filters keep of them weighs, and whether they were enough."""
    place = tl.arange(0, ROOM)
    is_token = place < num_tokens
    token = tl.load(summary.gathered_ids + place, mask=is_token, other=0)
    value = tl.load(summary.gathered_values + place, mask=is_token, other=float("-inf"))
    weight = tl.exp(value - shift)
    num_above, mass_above = _above(summary.gathered_values, num_tokens, shift, ROOM)
    has_top_k = filters.top_k > 0
    keep = is_token & (num_above < tl.where(has_top_k, filters.top_k, MAX_TOKENS))
    if filters.is_of_all:
        mass = row_mass(summary.chunk_max, summary.chunk_sum, shift, VOCAB_SIZE)
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
    """How many values lie above each of them, int32 [ROOM], and the sum of those exponentials relative to `shift`."""
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


@triton.jit
def _rank(value):
    """uint32 that order as the values do, 0 for -inf: what cannot be drawn reaches no edge above 0."""
    return tl.where(value == float("-inf"), 0, unsigned_rank(value))


@triton.jit
def _search_row(
    row,
    filters,
    summary,
    noise,
    largest,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """`draw_filtered` by reading the row again, up to eleven times a filter."""
    BLOCK: tl.constexpr = 2048
    above = unsigned_rank(largest) + 1
    edge = tl.full([], 1, tl.uint32)
    if filters.top_k > 0:
        edge = _search_edge(
            row, summary, largest, edge, above, filters.top_k.to(tl.float32), VOCAB_SIZE, HAS_PENALTIES, False, BLOCK
        )
    if filters.top_p < 1.0:
        if filters.is_of_all:
            mass = row_mass(summary.chunk_max, summary.chunk_sum, largest, VOCAB_SIZE)
        else:
            mass = tl.max(_reaching(row, summary, largest, edge, 0, VOCAB_SIZE, HAS_PENALTIES, True, BLOCK))
        # the most likely token weighs 1 and always stays, also for top_p = 0
        wanted = tl.maximum(mass * filters.top_p, 1.1754943508222875e-38)
        by_mass = _search_edge(
            row, summary, largest, tl.full([], 1, tl.uint32), above, wanted, VOCAB_SIZE, HAS_PENALTIES, True, BLOCK
        )
        edge = tl.maximum(edge, by_mass)

    key = noise_key(noise)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    kept = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        if _chunk_rank(summary, start, VOCAB_SIZE, BLOCK) >= edge:
            token = start + lane
            value = load_scaled(row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)
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
    row,
    summary,
    largest,
    low,
    high,
    wanted,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest rank that `wanted` tokens reach, or tokens that weigh `wanted` together."""
    while high - low > 1:
        step = (high - low + 7) // 8
        reaching = _reaching(row, summary, largest, low, step, VOCAB_SIZE, HAS_PENALTIES, IS_MASS, BLOCK)
        chosen = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32)) - 1, 0)
        low += chosen.to(tl.uint32) * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _reaching(
    row,
    summary,
    largest,
    low,
    step,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens, or what weight of them, reach each of the ranks low, low + step, ...: fp32 [8]."""
    threshold = low + tl.arange(0, 8).to(tl.uint32) * step
    counts = tl.zeros([BLOCK, 8], tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        if _chunk_rank(summary, start, VOCAB_SIZE, BLOCK) >= low:
            token = start + tl.arange(0, BLOCK)
            value = load_scaled(row, token, token < VOCAB_SIZE, VOCAB_SIZE, HAS_PENALTIES)
            rank = _rank(value)
            if IS_MASS:
                weight = tl.exp(value - largest)
                counts += tl.where(rank[:, None] >= threshold[None, :], weight[:, None], 0.0)
            else:
                counts += (rank[:, None] >= threshold[None, :]).to(tl.float32)
    return tl.sum(counts, axis=0)


@triton.jit
def _chunk_rank(summary, start, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The rank of the largest value of BLOCK tokens from `start` on."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    chunk = start // CHUNK + tl.arange(0, BLOCK // CHUNK)
    return _rank(tl.max(tl.load(summary.chunk_max + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))))
