"""Target and draft distributions, and the residual that a rejected draft leaves of them, one tile of tokens at a time.

Rejection sampling compares a target distribution P with the draft distribution Q that its children were drawn from.
Deleting a child t that could have been accepted with at most the probability a leaves

    P <- norm((a P - Q)+)        Q <- norm(Q without t), or Q as it was where children are drawn with replacement

(a = 1: SpecInfer, arXiv 2305.09781, and RSD, arXiv 2402.14160; else: traversal verification, arXiv 2505.12398). After
several deletions a token's P and Q are still functions of its first p and q and of four numbers a step: a, both masses
that were left, and t. So no vector of the vocabulary's size is ever written: whoever needs P and Q, of a tile or of one
token, reads the rows and takes the steps again (`apply_steps`).

A row is read as probabilities (`row_probs`) from logits at a temperature, with statistics that one scan leaves, or from
probabilities. Draft distributions may live on a reduced vocabulary: `draft_ids` says where a target token lies in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime import check
from ..runtime.language import tl, triton
from .ordering import LOWEST_KEY, comparable, noisy_key, noisy_key_id
from .random import STREAM_ACCEPT, STREAM_RESIDUAL, add_gumbel, fine_bits, random_block, token_words, uniform
from .sampling import check_vocabulary

# Below this temperature a row is one-hot at its largest logit: logits over it would leave the range of fp32.
GREEDY_BELOW = tl.constexpr(1e-5)

# A given probability may exceed 1 by what rounding in another precision leaves.
LARGEST_PROB = tl.constexpr(1.001)

# Words of int32 scratch that one step takes.
STEP_WORDS = tl.constexpr(4)

_STREAM_ACCEPT = tl.constexpr(STREAM_ACCEPT)
_STREAM_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)

_LARGEST_FINITE = tl.constexpr(3.4028234663852886e38)


class Row(NamedTuple):
    """One row of logits or probabilities; scale, maximum, total and best have a meaning for logits only."""

    row_ptr: Any
    size: Any  # tokens in it
    scale: Any  # 1 / temperature
    maximum: Any  # the largest scaled logit
    total: Any  # sum of exp(scaled logit - maximum)
    best: Any  # the one token of a greedy row, -1 for a row that is sampled


class Pair(NamedTuple):
    """The rows of target and draft as an op got them: tensors [rows, size] of logits or of probabilities."""

    target_ptr: Any
    draft_ptr: Any
    temperature_ptr: Any  # [B], None where nobody reads it
    draft_temperature_ptr: Any
    target_to_draft_ptr: Any  # see draft_ids
    scans_ptr: Any  # int32 [rows of logits, 3, slices]: the target's rows, if it has logits, then the draft's
    num_target_scans: Any
    vocab_size: Any
    draft_vocab_size: Any
    stride_target: Any  # of a row, int64
    stride_draft: Any


@triton.jit
def open_row(row_ptr, size, temperature, maximum, total, best):
    """The row at row_ptr, with the statistics that `scan_logits` (and `merge_scans`) found at this temperature."""
    scale, is_sampled = inverse_temperature(temperature)
    return Row(row_ptr, size, scale, maximum, total, tl.where(is_sampled, -1, best))


@triton.jit
def inverse_temperature(temperature):
    """1 / temperature, and whether the row is sampled; a NaN or what is below 1e-5 is greedy and not scaled."""
    is_sampled = temperature >= GREEDY_BELOW
    return tl.where(is_sampled, tl.math.div_rn(1.0, tl.where(is_sampled, temperature, 1.0)), 1.0), is_sampled


@triton.jit
def load_scaled(row_ptr, ids, mask, scale):
    """Scaled logits fp32: NaN and masked lanes -inf, +inf the largest finite number, -0 as 0."""
    logit = tl.load(row_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(comparable(logit * scale), _LARGEST_FINITE)


@triton.jit
def scan_logits(row_ptr, start, stop, temperature, BLOCK_VOCAB: tl.constexpr):
    """maximum, total and best (lowest id int32 of the maximum) of tokens start .. stop - 1 of a row of logits."""
    scale, _ = inverse_temperature(temperature)
    lane = tl.arange(0, BLOCK_VOCAB)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    best = tl.full([], 0, tl.int32) + start
    for first in range(start, stop, BLOCK_VOCAB):
        ids = first + lane
        scaled = load_scaled(row_ptr, ids, ids < stop, scale)
        tile_maximum = tl.max(scaled)
        tile_best = tl.min(tl.where(scaled == tile_maximum, ids, 2147483647))
        best = tl.where(tile_maximum > maximum, tile_best, best)
        larger = tl.maximum(maximum, tile_maximum)
        anchor = _anchor(larger)
        total = total * tl.exp(maximum - anchor) + tl.sum(tl.exp(scaled - anchor))
        maximum = larger
    return maximum, total, best


@triton.jit
def merge_scans(maxima, totals, bests, AXIS: tl.constexpr):
    """The statistics of rows that were scanned in slices; lanes without a slice hold -inf, 0, 2147483647."""
    maximum = tl.max(maxima, axis=AXIS)
    anchor = _anchor(maximum)
    total = tl.sum(totals * tl.exp(maxima - tl.expand_dims(anchor, AXIS)), axis=AXIS)
    best = tl.min(tl.where(maxima == tl.expand_dims(maximum, AXIS), bests, 2147483647), axis=AXIS)
    return maximum, total, best


@triton.jit
def store_scan(row_ptr, size, temperature, scans_ptr, part, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Scans slice `part` of a row, BLOCK_VOCAB tokens, into the row's scratch scans [3, NUM_SLICES] int32."""
    start = part * BLOCK_VOCAB
    maximum, total, best = scan_logits(row_ptr, start, tl.minimum(start + BLOCK_VOCAB, size), temperature, BLOCK_VOCAB)
    tl.store(scans_ptr + part, maximum.to(tl.int32, bitcast=True))
    tl.store(scans_ptr + NUM_SLICES + part, total.to(tl.int32, bitcast=True))
    tl.store(scans_ptr + 2 * NUM_SLICES + part, best)


@triton.jit
def load_row(
    row_ptr,
    size,
    temperature_ptr,
    request,
    scans_ptr,
    scan,
    NUM_SLICES: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    IS_PROBS: tl.constexpr,
    IS_VECTOR: tl.constexpr,
):
    """The row at row_ptr; if it is of logits, at its request's temperature and with the scan number `scan`.

    IS_VECTOR: row_ptr and scan are vectors, one row each.
    """
    if IS_PROBS:
        return Row(row_ptr, size, 1.0, 0.0, 1.0, -1)
    else:
        AXIS: tl.constexpr = 1 if IS_VECTOR else 0
        part = tl.arange(0, BLOCK_SLICE)
        is_part = part < NUM_SLICES
        place = scan * (3 * NUM_SLICES)
        if IS_VECTOR:
            place = place[:, None]
            part = part[None, :]
            is_part = is_part[None, :]
        maxima = tl.load(scans_ptr + place + part, mask=is_part, other=-8388608)  # the bits of -inf
        totals = tl.load(scans_ptr + place + NUM_SLICES + part, mask=is_part, other=0)
        bests = tl.load(scans_ptr + place + 2 * NUM_SLICES + part, mask=is_part, other=2147483647)
        maximum, total, best = merge_scans(
            maxima.to(tl.float32, bitcast=True), totals.to(tl.float32, bitcast=True), bests, AXIS
        )
        return open_row(row_ptr, size, tl.load(temperature_ptr + request), maximum, total, best)


@triton.jit
def load_target(
    pair,
    request,
    row,
    NUM_SLICES: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    IS_PROBS: tl.constexpr,
    IS_VECTOR: tl.constexpr = False,
):
    """The target's row number `row` int64 (or a vector of rows)."""
    return load_row(
        pair.target_ptr + row * pair.stride_target, pair.vocab_size, pair.temperature_ptr, request,
        pair.scans_ptr, row, NUM_SLICES, BLOCK_SLICE, IS_PROBS, IS_VECTOR,
    )  # fmt: skip


@triton.jit
def load_draft(
    pair,
    request,
    row,
    NUM_SLICES: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    IS_PROBS: tl.constexpr,
    IS_VECTOR: tl.constexpr = False,
):
    """The draft's row number `row` int64 (or a vector of rows)."""
    return load_row(
        pair.draft_ptr + row * pair.stride_draft, pair.draft_vocab_size, pair.draft_temperature_ptr, request,
        pair.scans_ptr, pair.num_target_scans + row, NUM_SLICES, BLOCK_SLICE, IS_PROBS, IS_VECTOR,
    )  # fmt: skip


@triton.jit
def _anchor(maximum):
    """The maximum, or 0 where no logit is above -inf: -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def row_probs(row, ids, is_token, IS_PROBS: tl.constexpr):
    """Probabilities fp32 of tokens, 0 where is_token is false or the row ends before `ids`.

    Given probabilities that are NaN, negative or above 1.001 count as 0; a row of logits none of which is above -inf
    has none above 0, unless it is greedy: its token is 0. `row` holds one row, or one per token.
    """
    is_token = is_token & (ids >= 0) & (ids < row.size)
    if IS_PROBS:
        probs = tl.load(row.row_ptr + ids, mask=is_token, other=0.0).to(tl.float32)
        return tl.where((probs > 0.0) & (probs <= LARGEST_PROB), probs, 0.0)
    else:
        scaled = load_scaled(row.row_ptr, ids, is_token, row.scale)
        weight = tl.exp(scaled - _anchor(row.maximum))
        probs = weight * tl.math.div_rn(1.0, tl.where(row.total > 0.0, row.total, 1.0))
        is_best = is_token & (ids == row.best)
        return tl.where(row.best >= 0, is_best.to(tl.float32), probs)


@triton.jit
def draft_ids(target_to_draft_ptr, ids, is_token, vocab_size):
    """Where target tokens lie in the draft vocabulary, -1 for nowhere; target_to_draft None: both are one."""
    if target_to_draft_ptr is not None:
        is_known = is_token & (ids >= 0) & (ids < vocab_size)
        return tl.load(target_to_draft_ptr + ids, mask=is_known, other=-1)
    else:
        return tl.where(is_token, ids, -1)


@triton.jit
def invert_draft_map(
    d2t_ptr,
    target_to_draft_ptr,
    part,
    vocab_size,
    draft_vocab_size,
    BLOCK_TARGET: tl.constexpr,
    BLOCK_DRAFT: tl.constexpr,
):
    """target_to_draft [V] int32 of one part of BLOCK_TARGET target tokens, from d2t [Vd]: target id - draft id.

    The map must be one to one. Every program reads all of d2t, so that none has to wait for another.
    """
    start = part.to(tl.int64) * BLOCK_TARGET
    stop = tl.minimum(start + BLOCK_TARGET, vocab_size)
    target = start + tl.arange(0, BLOCK_TARGET)
    tl.store(target_to_draft_ptr + target, tl.full([BLOCK_TARGET], -1, tl.int32), mask=target < stop)
    tl.debug_barrier()  # other threads write there
    for first in range(0, draft_vocab_size, BLOCK_DRAFT):
        draft = first + tl.arange(0, BLOCK_DRAFT)
        is_draft = draft < draft_vocab_size
        mapped = draft + tl.load(d2t_ptr + draft, mask=is_draft, other=0).to(tl.int64)
        tl.store(target_to_draft_ptr + mapped, draft, mask=is_draft & (mapped >= start) & (mapped < stop))


@triton.jit
def take_step(target, draft, ids, acceptance, target_mass, draft_mass, token, KEEPS_DRAFT: tl.constexpr):
    """P and Q of tokens after one deletion: see the module's docstring.

    target_mass: the sum of (acceptance P - Q)+ over all tokens; where it is 0 nothing is left of P, which stays as it
    was (in exact arithmetic the child would have been accepted). draft_mass: the sum of Q without the token; where it
    is 0 nothing is left of Q.
    """
    left = tl.maximum(acceptance * target - draft, 0.0)
    has_target = target_mass > 0.0
    target = tl.where(has_target, left * tl.math.div_rn(1.0, tl.where(has_target, target_mass, 1.0)), target)
    if not KEEPS_DRAFT:
        has_draft = draft_mass > 0.0
        scale = tl.where(has_draft, tl.math.div_rn(1.0, tl.where(has_draft, draft_mass, 1.0)), 0.0)
        draft = tl.where(ids == token, 0.0, draft * scale)
    return target, draft


@triton.jit
def apply_steps(target, draft, ids, steps_ptr, num_steps, KEEPS_DRAFT: tl.constexpr):
    """P and Q of tokens (or of one) after the `num_steps` deletions that `store_step` wrote to steps_ptr."""
    for index in range(num_steps):
        step_ptr = steps_ptr + index * STEP_WORDS
        acceptance = tl.load(step_ptr).to(tl.float32, bitcast=True)
        target_mass = tl.load(step_ptr + 1).to(tl.float32, bitcast=True)
        draft_mass = tl.load(step_ptr + 2).to(tl.float32, bitcast=True)
        token = tl.load(step_ptr + 3)
        target, draft = take_step(target, draft, ids, acceptance, target_mass, draft_mass, token, KEEPS_DRAFT)
    return target, draft


@triton.jit
def store_step(steps_ptr, index, acceptance, target_mass, draft_mass, token):
    """Writes deletion number `index` to int32 scratch that this program alone reads, and lets it be seen."""
    step_ptr = steps_ptr + index * STEP_WORDS
    tl.debug_barrier()  # nobody reads what stood there any more
    tl.store(step_ptr, acceptance.to(tl.int32, bitcast=True))
    tl.store(step_ptr + 1, target_mass.to(tl.int32, bitcast=True))
    tl.store(step_ptr + 2, draft_mass.to(tl.int32, bitcast=True))
    tl.store(step_ptr + 3, token)
    tl.debug_barrier()


@triton.jit
def residual_masses(
    target_row,
    draft_row,
    target_to_draft_ptr,
    steps_ptr,
    num_steps,
    acceptance,
    token,
    num_ids,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    KEEPS_DRAFT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
):
    """target_mass and draft_mass of the next deletion, that of `token`, after `num_steps`; ids run to num_ids."""
    target_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    draft_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, num_ids, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_probs(
            target_row, draft_row, target_to_draft_ptr, ids, ids < num_ids, TARGET_IS_PROBS, DRAFT_IS_PROBS
        )
        target, draft = apply_steps(target, draft, ids, steps_ptr, num_steps, KEEPS_DRAFT)
        target_sums += tl.maximum(acceptance * target - draft, 0.0)
        draft_sums += tl.where(ids == token, 0.0, draft)
    return tl.sum(target_sums), tl.sum(draft_sums)


@triton.jit
def load_probs(
    target_row,
    draft_row,
    target_to_draft_ptr,
    ids,
    is_token,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
):
    """p and q of tokens by their target ids, of a tile or of one token."""
    target = row_probs(target_row, ids, is_token, TARGET_IS_PROBS)
    places = draft_ids(target_to_draft_ptr, ids, is_token, target_row.size)
    return target, row_probs(draft_row, places, places >= 0, DRAFT_IS_PROBS)


@triton.jit
def accept_coin(seed, position, draw):
    """The coin of the draft token at `position`; `draw` tells drafts of one position apart."""
    return uniform(seed, position, _STREAM_ACCEPT, draw)


@triton.jit
def residual_key(seed, position):
    """The noise key of the token that is drawn for `position` from what the drafts have left."""
    return random_block(seed, position, _STREAM_RESIDUAL, 0)


@triton.jit
def draw_keys(weights, ids, noise_key):
    """Keys int64 whose maximum draws a token by its weight; LOWEST_KEY for weights of 0.

    log(weight) + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030): the weights need not sum to 1.
    noise_key: the `random_block` of the draw.
    """
    return keys_of_words(weights, ids, token_words(noise_key, ids))


@triton.jit
def keys_of_words(weights, ids, words):
    """As draw_keys, from the tokens' words."""
    has_weight = weights > 0.0
    race = add_gumbel(tl.log(tl.where(has_weight, weights, 1.0)), words)
    return tl.where(has_weight, noisy_key(race, fine_bits(words), ids), LOWEST_KEY)


@triton.jit
def drawn_token(key):
    """The token int32 of the largest draw key; 0 where no token had a weight."""
    return tl.where(key == LOWEST_KEY, 0, noisy_key_id(key))


def check_pair(args: check.Arguments, num_target_rows: int, num_draft_rows: int) -> None:
    """What ops ask of target and draft distributions, and of what their draws are keyed by; B is bound before."""
    if args.exactly_one("target_logits", "target_probs") == "target_logits":
        args.tensor("target_logits", (num_target_rows, "V"), check.FLOAT, contiguous=1)
    else:
        args.tensor("target_probs", (num_target_rows, "V"), (torch.float32,), contiguous=1)
    if args.exactly_one("draft_logits", "draft_probs") == "draft_logits":
        args.tensor("draft_logits", (num_draft_rows, "Vd"), check.FLOAT, contiguous=1)
    else:
        args.tensor("draft_probs", (num_draft_rows, "Vd"), (torch.float32,), contiguous=1)
    for name, axis in (("target", "V"), ("draft", "Vd")):
        given = name + ("_logits" if args.values[name + "_logits"] is not None else "_probs")
        check_vocabulary(args, given, axis)
    args.tensor("positions", (num_target_rows,), check.INTEGER)
    args.tensor("seeds", ("B",), check.INTEGER)
    draft_needs = args.values["draft_logits"] is not None and args.values["draft_temperature"] is None
    is_needed = args.values["target_logits"] is not None or draft_needs
    args.tensor("temperature", ("B",), (torch.float32,), optional=not is_needed)
    args.tensor("draft_temperature", ("B",), (torch.float32,), optional=True)
    args.tensor("d2t", ("Vd",), check.INTEGER, optional=True)
