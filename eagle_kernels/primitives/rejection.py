"""Recursive rejection: what the rejected children of a node have left of the target and of the draft.

Rejecting a child t makes of the target's p and the draft's q

    p <- norm((p - q)+)        q <- norm(q without t), or q as it was where children are drawn with replacement

Taken without their masses, these are p_j = (p_(j-1) - m q_(j-1))+ with a number m, and q_j is q without tokens. As
((x)+ - y)+ = (x - y)+ for y >= 0, all steps together are one: p_j = (p - a q)+, where a collects the numbers m. At a
rejected t it is 0: rejection says coin * q(t) >= p(t). So however many children were rejected, what is left of a token
takes one subtraction, and the list of the rejected tokens, which the tree itself holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.language import tl, triton
from .ordering import LOWEST_KEY
from .residual import draft_ids, draw_keys, drawn_token, load_probs, load_scaled

# Below this share of q its tokens are put on a scale of their own.
SMALL_SHARE = tl.constexpr(1e-9)
# Given probabilities do not reach below.
SMALLEST_MASS = tl.constexpr(1e-37)


class Node(NamedTuple):
    """A node's distributions, and what the children rejected so far have left of them."""

    target_row: Any
    draft_row: Any
    target_to_draft: Any
    scale: Any  # how much of q has been taken from p
    candidates: Any  # pointers to what belongs to the request
    siblings: Any
    first_child: Any
    num_rejected: Any  # of its children, from the first on


@triton.jit
def _is_rejected(node, ids):
    """Whether tokens are those of rejected children."""
    found = ids < 0
    sibling = node.first_child
    for _ in range(node.num_rejected):
        token = tl.load(node.candidates + sibling).to(tl.int64)
        token = tl.where((token >= 0) & (token < 2147483648), token, -1).to(tl.int32)
        found = found | (ids == token)
        sibling = tl.load(node.siblings + sibling).to(tl.int32)
    return found


@triton.jit
def load_left(node, ids, is_token, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
               KEEPS_DRAFT: tl.constexpr):  # fmt: skip
    """What is left of p and q, neither normalised, of a tile of tokens or of one."""
    target, draft = load_probs(
        node.target_row, node.draft_row, node.target_to_draft, ids, is_token, TARGET_IS_PROBS, DRAFT_IS_PROBS
    )
    target = tl.maximum(target - node.scale * draft, 0.0)
    if not KEEPS_DRAFT:
        is_gone = _is_rejected(node, ids)
        target = tl.where(is_gone, 0.0, target)
        draft = tl.where(is_gone, 0.0, draft)
    return target, draft


@triton.jit
def left_masses(node, NUM_IDS: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
            KEEPS_DRAFT: tl.constexpr, BLOCK_VOCAB: tl.constexpr):  # fmt: skip
    """The sums of what is left of p and q."""
    target_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    draft_sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, NUM_IDS, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_left(node, ids, ids < NUM_IDS, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
        target_sums += target
        draft_sums += draft
    return tl.sum(target_sums), tl.sum(draft_sums)


@triton.jit
def rescan_draft(node, NUM_IDS: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """The largest of the scaled draft logits that are left, and the sum of exponentials relative to it."""
    largest = tl.full([BLOCK_VOCAB], float("-inf"), tl.float32)
    for first in range(0, NUM_IDS, BLOCK_VOCAB):
        largest = tl.maximum(largest, _load_scores_left(node, first + tl.arange(0, BLOCK_VOCAB), NUM_IDS))
    maximum = tl.max(largest)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    sums = tl.zeros([BLOCK_VOCAB], tl.float32)
    for first in range(0, NUM_IDS, BLOCK_VOCAB):
        sums += tl.exp(_load_scores_left(node, first + tl.arange(0, BLOCK_VOCAB), NUM_IDS) - anchor)
    return anchor, tl.sum(sums)


@triton.jit
def _load_scores_left(node, ids, NUM_IDS: tl.constexpr):
    """Scaled draft logits by target ids, -inf for tokens that cannot be drawn any more."""
    row = node.draft_row
    places = draft_ids(node.target_to_draft, ids, ids < NUM_IDS, node.target_row.size)
    scaled = load_scaled(row.row_ptr, places, (places >= 0) & (places < row.size), row.scale)
    return tl.where(_is_rejected(node, ids), float("-inf"), scaled)


@triton.jit
def draw_left(node, noise_key, NUM_IDS: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
          KEEPS_DRAFT: tl.constexpr, BLOCK_VOCAB: tl.constexpr):  # fmt: skip
    """A token by what is left of p."""
    best = tl.full([BLOCK_VOCAB], LOWEST_KEY, tl.int64)
    for first in range(0, NUM_IDS, BLOCK_VOCAB):
        ids = first + tl.arange(0, BLOCK_VOCAB)
        target, _ = load_left(node, ids, ids < NUM_IDS, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
        best = tl.maximum(best, draw_keys(target, ids, noise_key))
    return drawn_token(tl.max(best))
