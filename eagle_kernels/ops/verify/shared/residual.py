"""The residual that rejected drafts leave of target and draft distributions, one tile of tokens at a time.

Rejection sampling compares a target distribution P with the draft distribution Q that its children were drawn from.
Deleting a child t that could have been accepted with at most the probability a leaves

    P <- norm((a P - Q)+)        Q <- norm(Q without t), or Q as it was where children are drawn with replacement

(a = 1: SpecInfer, arXiv 2305.09781, and RSD, arXiv 2402.14160; else: traversal verification, arXiv 2505.12398). After
several deletions a token's P and Q are still functions of its first p and q and of four numbers a step: a, both masses
that were left, and t. So no vector of the vocabulary's size is ever written: whoever needs P and Q, of a tile or of one
token, reads the rows (`pair.py`) and takes the steps again (`apply_steps`). Coins and draws of the verifiers are here
too.
"""

from __future__ import annotations

from ....primitives.ordering import LOWEST_KEY, noisy_key, noisy_key_id
from ....runtime.language import tl, triton
from .pair import load_probs
from .random import STREAM_ACCEPT, STREAM_RESIDUAL, add_gumbel, fine_bits, random_block, token_words, uniform

# Words of int32 scratch that one step takes.
STEP_WORDS = tl.constexpr(4)

_STREAM_ACCEPT = tl.constexpr(STREAM_ACCEPT)
_STREAM_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)


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
