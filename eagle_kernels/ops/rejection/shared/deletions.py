"""The part of verify_tree_traversal that computes what deleted children leave of P and Q, one tile of tokens at a time.

Deleting a child t of a node, which could have been accepted with the probability a at most, leaves

    P <- norm((a P - Q)+)        Q <- norm(Q without t)

(Traversal verification, arXiv 2505.12398.) After several deletions a token's P and Q are still functions of its first p
and q and of four numbers for each deletion: a, the two masses that normalise, and t. So no vector of the vocabulary's
size is ever written: P and Q of a tile, or of a single token, are computed from p and q by all deletions in turn
(`apply_deletions`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY
from ....runtime.language import tl, triton
from .draws import draw_keys, drawn_token
from .pair import load_probs

# Words of int32 scratch that one deletion takes.
DELETION_WORDS = tl.constexpr(4)


class Latest(NamedTuple):
    """The latest deletion of a walk, which need not be in memory yet."""

    slot: Any  # its place in memory; -1 for none
    acceptance: Any
    target_mass: Any
    draft_mass: Any
    token: Any


class Deletions(NamedTuple):
    """The deletions of one node's children: those in memory, in order, then the latest one if it is one of them."""

    words_ptr: Any  # int32 [count, 4]: see store_deletion
    count: Any
    has_latest: Any
    latest: Any  # Latest


@triton.jit
def no_deletion():
    """Returns a Latest that is none."""
    zero = tl.zeros([], tl.float32)
    none = tl.zeros([], tl.int32)
    return Latest(none - 1, zero, zero, zero, none)


@triton.jit
def deletions_of(words_ptr, base, top, latest):
    """Returns the Deletions base .. top - 1 of all that are or will be at words_ptr."""
    has_latest = (latest.slot >= base) & (latest.slot < top)
    return Deletions(words_ptr + base * DELETION_WORDS, top - base - has_latest.to(tl.int32), has_latest, latest)


@triton.jit
def _delete(target, draft, ids, acceptance, target_mass, draft_mass, token):
    """Returns P and Q of tokens after one deletion: see the module's docstring.
    target_mass: the sum of (acceptance P - Q)+ over all tokens; if it is 0 nothing is left of P, which stays as it was
    (in exact arithmetic the child would have been accepted). draft_mass: the sum of Q without the token; if it is 0
    nothing is left of Q."""
    left = tl.maximum(acceptance * target - draft, 0.0)
    has_target = target_mass > 0.0
    target = tl.where(has_target, left * tl.math.div_rn(1.0, tl.where(has_target, target_mass, 1.0)), target)
    has_draft = draft_mass > 0.0
    scale = tl.where(has_draft, tl.math.div_rn(1.0, tl.where(has_draft, draft_mass, 1.0)), 0.0)
    return target, tl.where(ids == token, 0.0, draft * scale)


@triton.jit
def apply_deletions(target, draft, ids, deletions):
    """Returns P and Q of tokens, or of a single one, whose first p and q are `target` and `draft`."""
    for index in range(deletions.count):
        words_ptr = deletions.words_ptr + index * DELETION_WORDS
        acceptance = tl.load(words_ptr).to(tl.float32, bitcast=True)
        target_mass = tl.load(words_ptr + 1).to(tl.float32, bitcast=True)
        draft_mass = tl.load(words_ptr + 2).to(tl.float32, bitcast=True)
        token = tl.load(words_ptr + 3)
        target, draft = _delete(target, draft, ids, acceptance, target_mass, draft_mass, token)
    if deletions.has_latest:
        last = deletions.latest
        target, draft = _delete(
            target, draft, ids, last.acceptance, last.target_mass, last.draft_mass, last.token
        )  # fmt: skip
    return target, draft


@triton.jit
def store_deletion(words_ptr, latest):
    """Writes the latest deletion to its slot at words_ptr, and makes it visible to the whole program."""
    words_ptr += latest.slot * DELETION_WORDS
    tl.debug_barrier()  # other threads may still read what stood there
    tl.store(words_ptr, latest.acceptance.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 1, latest.target_mass.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 2, latest.draft_mass.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 3, latest.token)
    tl.debug_barrier()


@triton.jit
def left_after(target, draft, ids, acceptance, token):
    """Returns (a P - Q)+ and Q without the token, neither normalised, of a tile: what one more deletion leaves."""
    return tl.maximum(acceptance * target - draft, 0.0), tl.where(ids == token, 0.0, draft)


@triton.jit
def masses_left(rows, pair, deletions, acceptance, token, BLOCK_VOCAB: tl.constexpr):
    """Returns target_mass and draft_mass of the deletion of `token` after `deletions`."""
    target_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    draft_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, rows.num_ids, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_probs(rows, pair, ids, ids < rows.num_ids)
        target, draft = apply_deletions(target, draft, ids, deletions)
        target, draft = left_after(target, draft, ids, acceptance, token)
        target_sums += target
        draft_sums += draft
    return tl.sum(target_sums), tl.sum(draft_sums)


@triton.jit
def draw_left(rows, pair, deletions, noise_key, num_ids, BLOCK_VOCAB: tl.constexpr):
    """Draws a token by the P that the deletions leave; ids run to num_ids."""
    best = tl.full([BLOCK_VOCAB], LOWEST_KEY, tl.int64)
    for first in range(0, num_ids, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_probs(rows, pair, ids, ids < num_ids)
        target, _ = apply_deletions(target, draft, ids, deletions)
        best = tl.maximum(best, draw_keys(target, ids, noise_key))
    return drawn_token(tl.max(best))
