"""The part of verify_tree_rejection that computes what rejected children of a node leave of the target and the draft.

Rejecting a child t makes of the target's p and the draft's q

    p <- norm((p - q)+)        q <- norm(q without t), or q as it was if children are drawn with replacement

Without the normalisation these are p_j = (p_(j-1) - m q_(j-1))+ with a number m, and q_j is q without some tokens. As
((x)+ - y)+ = (x - y)+ for y >= 0, all rejections together are a single subtraction: p_j = (p - a q)+, where a collects
the numbers m. At a rejected t it is 0, because rejection means coin * q(t) >= p(t). So however many children were
rejected, what is left of a token takes one subtraction and the list of the rejected tokens, which is in the tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import LOWEST_KEY
from ....primitives.rows import load_scaled
from ....runtime.language import tl, triton
from .draws import draw_keys, drawn_token
from .pair import draft_ids, load_probs

# If less than this share of q is left, the tokens left are put on a scale of their own.
SMALL_SHARE = tl.constexpr(1e-9)
# A smaller sum of q counts as 0; given probabilities do not reach below it.
SMALLEST_MASS = tl.constexpr(1e-37)


class Node(NamedTuple):
    """A node's distributions and children, none of it changed by a rejection."""

    pair: Any  # Pair
    is_certain: Any  # whether its children were chosen, not drawn: then q is one-hot at each of them, and not read
    tree: Any  # Tree
    first_child: Any
    positions: Any  # pointer to those of the request's nodes
    seed: Any


class State(NamedTuple):
    """How far a node has come (`rejection_steps.py`), and what the children rejected so far have left of p and q."""

    phase: Any
    child: Any
    num_seen: Any  # children visited
    num_rejected: Any  # of its children, from the first on
    token: Any  # the drawn one
    scale: Any  # how much of q has been taken from p
    mass: Any  # the sum of what is left of p
    draft_mass: Any  # and of q


@triton.jit
def _is_rejected(node, state, ids):
    """Tells which tokens are those of rejected children."""
    tree = node.tree
    nodes = tl.arange(0, tree.links.shape[0])
    found = ids < 0
    sibling = node.first_child
    for _ in range(state.num_rejected):
        is_here = nodes == sibling
        found = found | (ids == tl.sum(tl.where(is_here, tree.tokens, 0)))
        sibling = tl.sum(tl.where(is_here, tree.links, 0)) & 0xFFFF
    return found


@triton.jit
def load_left(rows, node, state, ids, is_token, KEEPS_DRAFT: tl.constexpr):
    """Returns what is left of p and q, neither normalised, of a tile of tokens or of a single one."""
    target, draft = load_probs(rows, node.pair, ids, is_token)
    target = tl.maximum(target - state.scale * draft, 0.0)
    if not KEEPS_DRAFT:
        is_gone = _is_rejected(node, state, ids)
        target = tl.where(is_gone, 0.0, target)
        draft = tl.where(is_gone, 0.0, draft)
    return target, draft


@triton.jit
def left_probs(rows, node, state, token, KEEPS_DRAFT: tl.constexpr):
    """Returns p and q of a child's token as the children before it left them, normalised; 0 where nothing is left."""
    target, draft = load_left(rows, node, state, token, token >= 0, KEEPS_DRAFT)
    has_mass = state.mass > 0.0
    target = tl.where(has_mass, target / tl.where(has_mass, state.mass, 1.0), 0.0)
    has_draft = state.draft_mass > SMALLEST_MASS
    draft = tl.where(has_draft, draft / tl.where(has_draft, state.draft_mass, 1.0), 0.0)
    return target, tl.where(node.is_certain, 1.0, draft)


@triton.jit
def next_scale(node, state):
    """Returns the scale of a node after one more rejection."""
    has_draft = state.draft_mass > SMALLEST_MASS
    return state.scale + tl.where(node.is_certain, 0.0, state.mass / tl.where(has_draft, state.draft_mass, 1.0))


@triton.jit
def masses_after(node, state, new_mass, new_draft_mass, KEEPS_DRAFT: tl.constexpr):
    """Returns scale, mass and draft_mass of a node after one more rejection, which leaves the sums `new_`.
    If nothing is left of p it stays as it was."""
    has_left = new_mass > 0.0
    scale = tl.where(has_left, next_scale(node, state), state.scale)
    mass = tl.where(has_left, new_mass, state.mass)
    if KEEPS_DRAFT:
        return scale, mass, state.draft_mass
    else:
        return scale, mass, new_draft_mass


@triton.jit
def masses_left(rows, node, state, KEEPS_DRAFT: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Returns the sums of what is left of p and q."""
    target_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    draft_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, rows.num_ids, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_left(rows, node, state, ids, ids < rows.num_ids, KEEPS_DRAFT)
        target_sums += target
        draft_sums += draft
    return tl.sum(target_sums), tl.sum(draft_sums)


@triton.jit
def rescan_draft(rows, node, state, BLOCK_VOCAB: tl.constexpr):
    """Returns the largest of the scaled draft logits that are left, and the sum of exponentials relative to it."""
    largest = tl.full([BLOCK_VOCAB], float("-inf"), tl.float32)
    for first in range(0, rows.num_ids, BLOCK_VOCAB):
        largest = tl.maximum(largest, _load_scores_left(rows, node, state, first + tl.arange(0, BLOCK_VOCAB)))
    maximum = tl.max(largest)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, rows.num_ids, BLOCK_VOCAB):
        sums += tl.exp(_load_scores_left(rows, node, state, first + tl.arange(0, BLOCK_VOCAB)) - anchor)
    return anchor, tl.sum(sums)


@triton.jit
def _load_scores_left(rows, node, state, ids):
    """Returns scaled draft logits by target ids, -inf for tokens that cannot be drawn any more."""
    row = node.pair.draft
    places = draft_ids(rows, ids, ids < rows.num_ids, node.pair.target.size)
    scaled = load_scaled(row.row_ptr, places, (places >= 0) & (places < row.size), row.scale)
    return tl.where(_is_rejected(node, state, ids), float("-inf"), scaled)


@triton.jit
def draw_left(rows, node, state, noise_key, KEEPS_DRAFT: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Draws a token by what is left of p."""
    best = tl.full([BLOCK_VOCAB], LOWEST_KEY, tl.int64)
    for first in range(0, rows.num_ids, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, _ = load_left(rows, node, state, ids, ids < rows.num_ids, KEEPS_DRAFT)
        best = tl.maximum(best, draw_keys(target, ids, noise_key))
    return drawn_token(tl.max(best))
