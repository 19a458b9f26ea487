"""Coins and draws of the ops that verify drafts against the distribution they were drawn from."""

from __future__ import annotations

from ....primitives.ordering import LOWEST_KEY, noisy_key, noisy_key_id
from ....primitives.random import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    add_gumbel,
    fine_bits,
    random_block,
    token_words,
    uniform,
)
from ....runtime.language import tl, triton

_STREAM_ACCEPT = tl.constexpr(STREAM_ACCEPT)
_STREAM_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)


@triton.jit
def accept_coin(seed, position, draw):
    """Returns the coin of the draft token at `position`; `draw` tells the drafts of one position apart."""
    return uniform(seed, position, _STREAM_ACCEPT, draw)


@triton.jit
def residual_key(seed, position):
    """Returns the noise key of the token that is drawn for `position` from what the drafts have left."""
    return random_block(seed, position, _STREAM_RESIDUAL, 0)


@triton.jit
def draw_keys(weights, ids, noise_key):
    """Returns keys int64; the token of the largest one is drawn by its weight. LOWEST_KEY for weights of 0.
    A key is log(weight) + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030): weights need not sum to 1.
    noise_key: the `random_block` of the draw."""
    return keys_of_words(weights, ids, token_words(noise_key, ids))


@triton.jit
def keys_of_words(weights, ids, words):
    """Returns the keys of `draw_keys`, given the `token_words` of the ids."""
    has_weight = weights > 0.0
    race = add_gumbel(tl.log(tl.where(has_weight, weights, 1.0)), words)
    return tl.where(has_weight, noisy_key(race, fine_bits(words), ids), LOWEST_KEY)


@triton.jit
def drawn_token(key):
    """Returns the token int32 of the largest key; 0 if no token had a weight."""
    return tl.where(key == LOWEST_KEY, 0, noisy_key_id(key))
