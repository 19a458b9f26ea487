"""Top-k, top-p and min-p on one long row of scaled logits, exactly and without sorting it.

The row is read once by many programs (`scan_filtered`): of every group of LANES tokens they keep the maximum, of every
chunk of LANES groups the maximum and the sum of exponentials relative to it. One program then draws (`draw_filtered`):

* the WANTED-th largest maximum lies at or below the WANTED-th largest logit, so the tokens above it, a few more than
  WANTED, are among the groups that reach it. They are gathered, and each is compared with each: how many lie above it,
  and how much probability. That is all that the filters ask;
* if they are not enough to tell (a nucleus of thousands of tokens, k above MAX_TOP_K, hundreds of equal logits), the
  edge is searched for in the whole row, three bits of the float at a time.

The tokens that a filter keeps are those at or above an edge: tokens that tie with it all stay. A token stays in top-k
if fewer than k lie above it, in top-p if the tokens above it hold less than top_p of the probability, in min-p if it is
at least min_p times as likely as the most likely one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.language import tl, triton
from .logits import load_raw, load_scaled
from .ordering import LOWEST_KEY, noisy_key, noisy_key_id, unsigned_rank
from .random import add_grouped_gumbel, grouped_words

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

_NO_ID = tl.constexpr(2**31 - 1)


class Filters(NamedTuple):
    """The filters of one row, and whether any of them removes anything."""

    top_k: Any
    top_p: Any
    min_p: Any
    is_on: Any


class Summary(NamedTuple):
    """Pointers to what `scan_filtered` keeps of one row and to the room for what is gathered of it."""

    group_max: Any  # fp32 [num_chunks * LANES]
    chunk_max: Any  # fp32 [num_chunks]
    chunk_sum: Any
    raw_max: Any  # the same of the logits as the model gave them, if log-probabilities are wanted
    raw_sum: Any
    gathered_values: Any  # fp32 [MAX_TOKENS]
    gathered_weights: Any  # fp32 [MAX_TOKENS]
    gathered_ids: Any  # int32 [MAX_TOKENS]


@triton.jit
def load_filters(top_k_ptr, top_p_ptr, min_p_ptr, request, is_sampled, VOCAB_SIZE: tl.constexpr):
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
    return Filters(top_k, top_p, min_p, is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)))


@triton.jit
def scan_filtered(
    row,
    summary,
    part,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
):
    """Writes maxima and sums of the chunks of slice `part` of a row. Launched with as many warps as BLOCK_CHUNK."""
    chunk = part * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    # [BLOCK_CHUNK, CHUNK / WIDTH, WIDTH]: every warp reads chunks of its own, so no maximum and no sum crosses warps
    WIDTH: tl.constexpr = LANES * VECTOR
    offset = tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = chunk[:, None, None] * CHUNK + offset[None, :, :]
    is_token = token < VOCAB_SIZE
    value = load_scaled(row, token, is_token, VOCAB_SIZE, HAS_PENALTIES)
    group_max = tl.max(tl.reshape(value, [BLOCK_CHUNK, CHUNK // WIDTH, VECTOR, LANES]), axis=3)
    chunk_max, chunk_sum = _chunk_sums(value, tl.max(tl.max(group_max, axis=1), axis=1))

    # all from [BLOCK_CHUNK, LANES], where every warp still holds its chunks
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    lane = tl.arange(0, LANES)[None, :]
    chunk = chunk[:, None]
    is_first = (chunk < NUM_CHUNKS) & (lane == 0)
    tl.store(
        summary.group_max + chunk * LANES + lane, tl.reshape(group_max, [BLOCK_CHUNK, LANES]), mask=chunk < NUM_CHUNKS
    )
    tl.store(summary.chunk_max + chunk + lane, chunk_max[:, None], mask=is_first)
    tl.store(summary.chunk_sum + chunk + lane, chunk_sum[:, None], mask=is_first)
    if HAS_LOGPROBS:
        raw = load_raw(row, token, is_token)
        raw_max, raw_sum = _chunk_sums(raw, tl.max(tl.max(raw, axis=1), axis=1))
        tl.store(summary.raw_max + chunk + lane, raw_max[:, None], mask=is_first)
        tl.store(summary.raw_sum + chunk + lane, raw_sum[:, None], mask=is_first)


@triton.jit
def _chunk_sums(value, chunk_max):
    """Maxima [chunk] and the sums of exponentials of values [chunk, _, _] relative to them."""
    shift = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    return chunk_max, tl.sum(tl.sum(tl.exp(value - shift[:, None, None]), axis=1), axis=1)


@triton.jit
def row_mass(chunk_max_ptr, chunk_sum_ptr, VOCAB_SIZE: tl.constexpr):
    """Maxima [chunk] of a row, the largest one, and the row's sum of exponentials relative to it (0 if it is -inf)."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    chunk = tl.arange(0, max(triton.next_power_of_2(NUM_CHUNKS), LANES))
    chunk_max = tl.load(chunk_max_ptr + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + chunk, mask=chunk < NUM_CHUNKS, other=0.0)
    largest = tl.max(chunk_max)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return chunk_max, largest, tl.sum(chunk_sum * tl.exp(chunk_max - shift))


@triton.jit
def draw_filtered(
    row,
    filters,
    summary,
    noise_key,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    IS_JOINT: tl.constexpr,
):
    """The token int32 drawn from what the filters keep of a row, and with HAS_LOGPROBS the log of the kept sum of
    exponentials. A row of nothing but -inf gives token 0.
    """
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    # [chunk, LANES]; axes shorter than a warp are for the compiler to stumble over
    BLOCK_CHUNK: tl.constexpr = max(triton.next_power_of_2(NUM_CHUNKS), LANES)
    group = tl.arange(0, BLOCK_CHUNK)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    group_max = tl.load(summary.group_max + group, mask=group < NUM_CHUNKS * LANES, other=float("-inf"))
    chunk_max, largest, total = row_mass(summary.chunk_max, summary.chunk_sum, VOCAB_SIZE)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    has_top_k = filters.top_k > 0
    wanted = tl.where(has_top_k, filters.top_k, DEFAULT_WANTED)

    # a value that at least `wanted` tokens reach, and few groups
    low = _chunk_edge(chunk_max, wanted, NUM_CHUNKS)
    low, num_groups, slot = _raise_edge(group_max, low, largest, wanted, MAX_GROUPS)
    is_enough = (wanted <= MAX_TOP_K) & (num_groups <= MAX_GROUPS) & (largest > float("-inf"))
    num_tokens = tl.zeros([], tl.int32)
    if is_enough:
        tl.store(summary.gathered_ids + slot, group, mask=_reaches(group_max, low))
        tl.debug_barrier()
        place = tl.arange(0, MAX_GROUPS)
        gathered = tl.load(summary.gathered_ids + place, mask=place < num_groups, other=0)
        token = gathered[:, None] * LANES + tl.arange(0, LANES)[None, :]
        is_token = (place < num_groups)[:, None] & (token < VOCAB_SIZE)
        value = load_scaled(row, token, is_token, VOCAB_SIZE, HAS_PENALTIES)
        low, num_tokens, token_slot = _raise_edge(value, low, largest, wanted, MAX_TOKENS)
        is_enough = num_tokens <= MAX_TOKENS
        is_wanted = _reaches(value, low) & is_enough
        tl.debug_barrier()  # all groups have been read
        tl.store(summary.gathered_ids + token_slot, token, mask=is_wanted)
        tl.store(summary.gathered_values + token_slot, value, mask=is_wanted)
        tl.store(summary.gathered_weights + token_slot, tl.exp(value - shift), mask=is_wanted)
        tl.debug_barrier()

    chosen = tl.zeros([], tl.int32)
    kept_sum = tl.zeros([], tl.float32)
    if is_enough:
        place = tl.arange(0, MAX_TOKENS)
        is_token = place < num_tokens
        token = tl.load(summary.gathered_ids + place, mask=is_token, other=_NO_ID)
        value = tl.load(summary.gathered_values + place, mask=is_token, other=float("-inf"))
        weight = tl.load(summary.gathered_weights + place, mask=is_token, other=0.0)
        num_above = tl.zeros([MAX_TOKENS], tl.int32)
        mass_above = tl.zeros([MAX_TOKENS], tl.float32)
        for start in range(0, num_tokens, 32):
            # [other, token]: a thread holds a token and all others
            other = start + tl.arange(0, 32)
            other_value = tl.load(summary.gathered_values + other, mask=other < num_tokens, other=float("-inf"))
            other_weight = tl.load(summary.gathered_weights + other, mask=other < num_tokens, other=0.0)
            is_above = other_value[:, None] > value[None, :]
            num_above += tl.sum(is_above.to(tl.int32), axis=0)
            mass_above += tl.sum(tl.where(is_above, other_weight[:, None], 0.0), axis=0)
        keep = is_token & (num_above < tl.where(has_top_k, filters.top_k, MAX_TOKENS))
        mass = total
        if has_top_k:
            if not IS_JOINT:
                mass = tl.sum(tl.where(keep, weight, 0.0))
        else:
            # the nucleus, or else all that min-p keeps, must lie within what was gathered
            is_enough = (filters.top_p < 1.0) & (tl.sum(weight) >= filters.top_p * mass)
            is_enough |= tl.min(tl.where(is_token, weight, float("inf"))) < filters.min_p
        if filters.top_p < 1.0:
            keep &= (num_above == 0) | (mass_above < filters.top_p * mass)
        if filters.min_p > 0.0:
            keep &= weight >= tl.minimum(filters.min_p, 1.0)
        noisy, fine = add_grouped_gumbel(value, grouped_words(noise_key, token))
        chosen = noisy_key_id(tl.max(tl.where(keep, noisy_key(noisy, fine, token), LOWEST_KEY)))
        if HAS_LOGPROBS:
            kept_sum = tl.sum(tl.where(keep, weight, 0.0))
    if (not is_enough) & (largest > float("-inf")):
        chosen, kept_sum = _search_row(
            row, filters, summary, noise_key, largest, total, VOCAB_SIZE, HAS_PENALTIES, IS_JOINT
        )
    return tl.where(largest > float("-inf"), chosen, 0), shift + tl.log(kept_sum)


@triton.jit
def _chunk_edge(chunk_max, wanted, NUM_CHUNKS: tl.constexpr):
    """The `wanted`-th largest chunk maximum, which at least as many tokens reach; -inf if there are fewer chunks."""
    edge = tl.full([], float("-inf"), tl.float32)
    if wanted <= NUM_CHUNKS:
        # [other, chunk]
        num_above = tl.sum((chunk_max[:, None] > chunk_max[None, :]).to(tl.int32), axis=0)
        is_above = num_above >= wanted
        edge = tl.min(tl.where(is_above, float("inf"), tl.reshape(chunk_max, num_above.shape)))
    return edge


@triton.jit
def _reaches(values, low):
    """Which values reach `low`; -inf, which cannot be drawn, never does."""
    return (values >= low) & (values > float("-inf"))


@triton.jit
def _raise_edge(values, low, high, wanted, ROOM: tl.constexpr):
    """Raises `low` while more than ROOM of the values [n, LANES] reach it, as long as at least `wanted` do.

    Returns it, how many reach it, and the rank of each that does among them. `high` is the largest value.
    """
    reaching = _reaches(values, low).to(tl.int32)
    in_row = tl.sum(reaching, axis=1)
    count = tl.sum(in_row)
    if count > ROOM:
        if low == float("-inf"):
            # a finite place to start from: no matter which, what lies below is halved away
            low = tl.min(tl.min(tl.where(values > float("-inf"), values, high), axis=1))
        middle = low + (high - low) * 0.5
        while (count > ROOM) & (middle > low) & (middle < high):
            above = tl.sum(tl.sum(_reaches(values, middle).to(tl.int32), axis=1))
            low = tl.where(above >= wanted, middle, low)
            count = tl.where(above >= wanted, above, count)
            high = tl.where(above >= wanted, high, middle)
            middle = low + (high - low) * 0.5
        reaching = _reaches(values, low).to(tl.int32)
        in_row = tl.sum(reaching, axis=1)
    # the running sum of a row stays within a few lanes
    before = tl.cumsum(in_row, 0) - in_row
    return low, count, before[:, None] + tl.cumsum(reaching, 1) - 1


@triton.jit
def _rank(value):
    """uint32 that order as the values do, 0 for -inf: what cannot be drawn reaches no edge above 0."""
    return tl.where(value == float("-inf"), 0, unsigned_rank(value))


@triton.jit
def _search_row(
    row,
    filters,
    summary,
    noise_key,
    largest,
    total,
    VOCAB_SIZE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    IS_JOINT: tl.constexpr,
):
    """`draw_filtered` by reading the row again, up to eleven times a filter."""
    BLOCK: tl.constexpr = 2048
    above = unsigned_rank(largest) + 1
    edge = tl.full([], 1, tl.uint32)
    mass = total
    if filters.top_k > 0:
        edge = _search_edge(
            row, summary, largest, edge, above, filters.top_k.to(tl.float32), VOCAB_SIZE, HAS_PENALTIES, False, BLOCK
        )
        if not IS_JOINT:
            mass = tl.max(_reaching(row, summary, largest, edge, 0, VOCAB_SIZE, HAS_PENALTIES, True, BLOCK))
    if filters.top_p < 1.0:
        # the most likely token weighs 1 and always stays, also for top_p = 0
        wanted = tl.maximum(mass * filters.top_p, 1.1754943508222875e-38)
        by_mass = _search_edge(
            row, summary, largest, tl.full([], 1, tl.uint32), above, wanted, VOCAB_SIZE, HAS_PENALTIES, True, BLOCK
        )
        edge = tl.maximum(edge, by_mass)

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
            noisy, fine = add_grouped_gumbel(value, grouped_words(noise_key, token))
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
