"""Drawing one token from one row of logits: filters by exact thresholds, then the Gumbel-max trick.

argmax over the kept tokens of (logit / temperature + Gumbel noise) is a sample of their renormalised softmax (Gumbel
1954; Maddison et al., arXiv 1411.0030), so no probabilities are written and nothing is sorted.
"""

from __future__ import annotations

import torch

from ..runtime import check
from ..runtime.language import tl, triton
from .ordering import comparable, unsigned_rank
from .random import gumbel, random_block, token_words

# Every sampler launches with this row: probabilities are summed block by block and warp by warp, and equal logits must
# give equal tokens whichever op draws them.
TUNING = {"default": {"BLOCK_VOCAB": 1024, "num_warps": 4}}

# Below this temperature sampling is greedy: logits over it would leave the range of fp32.
GREEDY_BELOW = tl.constexpr(1e-5)


@triton.jit
def draw_token(
    row_ptr,
    vocab_size,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
):
    """The token int32 drawn from the row at `row_ptr`; temperatures below 1e-5 (or NaN) take the argmax.

    NaN logits count as -inf, ties go to the lowest id, a row without a finite or +inf logit gives token 0.
    """
    is_sampled = temperature >= GREEDY_BELOW
    inverse_temperature = tl.where(is_sampled, tl.math.div_rn(1.0, tl.where(is_sampled, temperature, 1.0)), 1.0)
    threshold = tl.zeros([], dtype=tl.uint32)
    if (HAS_TOP_K or HAS_TOP_P) or HAS_MIN_P:
        if is_sampled:
            threshold = _filter_threshold(
                row_ptr, vocab_size, inverse_temperature, top_k, top_p, min_p, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P,
                BLOCK_VOCAB,
            )  # fmt: skip

    noise_key = random_block(seed, position, STREAM, 0)
    lane = tl.arange(0, BLOCK_VOCAB)
    best_key = tl.full([BLOCK_VOCAB], float("-inf"), tl.float32)
    best_token = lane
    for start in range(0, vocab_size, BLOCK_VOCAB):
        scaled, is_token = _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB)
        key = tl.where(is_token & (unsigned_rank(scaled) >= threshold), scaled, float("-inf"))
        if is_sampled:
            key += gumbel(token_words(noise_key, start + lane))
        is_better = key > best_key
        best_key = tl.where(is_better, key, best_key)
        best_token = tl.where(is_better, start + lane, best_token)
    winner = tl.max(best_key, axis=0)
    token = tl.min(tl.where(best_key == winner, best_token, 2147483647), axis=0)
    return tl.where(winner == float("-inf"), 0, token).to(tl.int32)


@triton.jit
def _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB: tl.constexpr):
    """A block of logits / temperature in fp32, NaN as -inf, -0 as 0, and which lanes are tokens."""
    token = start + tl.arange(0, BLOCK_VOCAB)
    is_token = token < vocab_size
    logit = tl.load(row_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    return comparable(logit * inverse_temperature), is_token


@triton.jit
def _filter_threshold(
    row_ptr,
    vocab_size,
    inverse_temperature,
    top_k,
    top_p,
    min_p,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
):
    """Rank of the smallest scaled logit that top-k, then top-p, then min-p keep; ties at an edge all stay.

    Each edge is found exactly, one bit of the float at a time from the top: the count of tokens (top-k) or their
    probability (top-p) at or above a candidate only grows as the candidate falls.
    """
    threshold = tl.zeros([], dtype=tl.uint32)
    if HAS_TOP_K:
        if (top_k > 0) & (top_k < vocab_size):
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                candidate = threshold | bit
                bit = bit >> 1
                count = tl.zeros([BLOCK_VOCAB], dtype=tl.int32)
                for start in range(0, vocab_size, BLOCK_VOCAB):
                    scaled, is_token = _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB)
                    count += (is_token & (unsigned_rank(scaled) >= candidate)).to(tl.int32)
                threshold = tl.where(tl.sum(count, axis=0) >= top_k, candidate, threshold)

    if HAS_TOP_P or HAS_MIN_P:
        largest = tl.full([BLOCK_VOCAB], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK_VOCAB):
            scaled, is_token = _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB)
            largest = tl.maximum(largest, scaled)
        maximum = tl.max(largest, axis=0)

    if HAS_TOP_P:
        if top_p < 1.0:
            mass = _mass_above(row_ptr, vocab_size, inverse_temperature, maximum, threshold, BLOCK_VOCAB)
            # the most likely token weighs 1 and always stays, also for top_p = 0
            wanted = tl.maximum(mass * top_p, 1.1754943508222875e-38)
            kept_by_top_p = tl.zeros([], dtype=tl.uint32)
            bit = tl.full([], 0x80000000, tl.uint32)
            for _ in range(32):
                candidate = kept_by_top_p | bit
                bit = bit >> 1
                floor = tl.where(candidate > threshold, candidate, threshold)
                mass = _mass_above(row_ptr, vocab_size, inverse_temperature, maximum, floor, BLOCK_VOCAB)
                kept_by_top_p = tl.where(mass >= wanted, candidate, kept_by_top_p)
            threshold = tl.where(kept_by_top_p > threshold, kept_by_top_p, threshold)

    if HAS_MIN_P:
        if min_p > 0.0:
            # the smallest scaled logit whose weight reaches min_p; the largest weighs 1
            smallest = tl.full([BLOCK_VOCAB], float("inf"), tl.float32)
            for start in range(0, vocab_size, BLOCK_VOCAB):
                scaled, is_token = _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB)
                stays = is_token & (_weight(scaled, maximum) >= tl.minimum(min_p, 1.0))
                smallest = tl.minimum(smallest, tl.where(stays, scaled, float("inf")))
            kept_by_min_p = unsigned_rank(tl.min(smallest, axis=0))
            threshold = tl.where(kept_by_min_p > threshold, kept_by_min_p, threshold)
    return threshold


@triton.jit
def _weight(scaled, maximum):
    """Probability relative to the most likely token (an infinite maximum weighs 1, all else 0)."""
    return tl.where(scaled == maximum, 1.0, tl.exp(scaled - maximum))


@triton.jit
def _mass_above(row_ptr, vocab_size, inverse_temperature, maximum, floor, BLOCK_VOCAB: tl.constexpr):
    """Sum of the weights of the tokens whose rank is at least `floor`."""
    mass = tl.zeros([BLOCK_VOCAB], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK_VOCAB):
        scaled, is_token = _load_scaled(row_ptr, start, vocab_size, inverse_temperature, BLOCK_VOCAB)
        stays = is_token & (unsigned_rank(scaled) >= floor)
        mass += tl.where(stays, _weight(scaled, maximum), 0.0)
    return tl.sum(mass, axis=0)


def check_parameters(args: check.Arguments, axis: str) -> None:
    """Checks seeds, temperature and the filters, one of each per row of `axis`."""
    args.tensor("seeds", (axis,), check.INTEGER)
    args.tensor("temperature", (axis,), (torch.float32,))
    args.tensor("top_k", (axis,), check.INTEGER, optional=True)
    args.tensor("top_p", (axis,), (torch.float32,), optional=True)
    args.tensor("min_p", (axis,), (torch.float32,), optional=True)
    args.debug("temperature", "not be negative", lambda: args.values["temperature"] >= 0)


def check_vocabulary(args: check.Arguments, name: str) -> None:
    """A row of logits must offer a token."""
    if args.size("V") == 0:
        args.fail(name, "have at least one token a row", list(args.values[name].shape))
