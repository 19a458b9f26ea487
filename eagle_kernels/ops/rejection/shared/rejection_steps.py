"""The steps of verify_tree_rejection at one node: what its children are verified by, one after the other.

What comes of a node (the child that is accepted, or the token that is drawn) depends on nothing but the node: its
two rows, its children and their coins. It takes steps that need a pass over the vocabulary, and steps that do not:

    visit    goes from child to child until one is accepted or rejected, or none is left; reads single tokens only
    pass     sums and draws what is left of p and q after a rejection, or draws only
    settle   takes a rejection into account, given the sums of the pass

A pass is made by one program (`rejection.py`), or by many of them in slices (`rejection_rounds.py`).
"""

from __future__ import annotations

from ....primitives.rows import GREEDY_BELOW, Row, scan_row
from ....runtime.language import tl, triton
from .draws import accept_coin, drawn_token
from .pair import Pair, load_pair
from .rejection import (
    SMALL_SHARE,
    Node,
    State,
    draw_left,
    left_probs,
    masses_after,
    masses_left,
    next_scale,
    rescan_draft,
)

# Phases of a node.
DONE = tl.constexpr(0)  # the child is accepted; or it is 0, and the token drawn
VISITING = tl.constexpr(1)  # the child is the next one to visit, 0 if none is left
REJECTING = tl.constexpr(2)  # the child is rejected: a pass must tell what is left
DRAWING = tl.constexpr(3)  # no child is left: a pass must draw
ALONE = tl.constexpr(4)  # as REJECTING, but what follows is for one program

# Words of int32 scratch that a State takes.
STATE_WORDS = 8


@triton.jit
def open_node(
    rows, tree, request, current, child, coins,
    KEEPS_DRAFT: tl.constexpr, NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Returns the Node with the number `current`, whose first child is `child`, 0 for none; then q is not read.
    Rows of more than one slice are scanned already."""
    first = request * NUM_NODES
    # whether children were chosen, not drawn; a NaN counts as below
    is_certain = (tl.load(rows.draft.pointers.temperature + request) >= GREEDY_BELOW) == 0
    if KEEPS_DRAFT:
        is_certain = request < 0
    is_read = (child > 0) & (is_certain == 0)
    row = first + current
    if NUM_SLICES > 1:
        pair = load_pair(rows, request, row, is_read, NUM_SLICES)
    else:
        target = scan_row(rows.target, request, row, row >= 0, BLOCK_VOCAB)
        pair = Pair(target, scan_row(rows.draft, request, row, is_read, BLOCK_VOCAB))
    return Node(pair, is_certain, tree, child, coins.positions + first, tl.load(coins.seeds + request))


@triton.jit
def left_to_pass(node, state):
    """Returns the State that a pass sums and draws by: with the rejection that it is for, if there is one."""
    is_rejecting = state.phase == REJECTING
    num_rejected = tl.where(is_rejecting, state.num_seen, state.num_rejected)
    scale = tl.where(is_rejecting, next_scale(node, state), state.scale)
    return State(
        state.phase, state.child, state.num_seen, num_rejected, state.token, scale, state.mass, state.draft_mass
    )  # fmt: skip


@triton.jit
def first_state(child):
    """Returns the State of a node whose first child is `child`."""
    one = tl.full([], 1.0, tl.float32)
    return State(child * 0 + VISITING, child, child * 0, child * 0, child * 0, one * 0.0, one, one)


@triton.jit
def select_state(condition, first, second):
    """Returns the first State where the condition holds, else the second."""
    return State(
        tl.where(condition, first.phase, second.phase), tl.where(condition, first.child, second.child),
        tl.where(condition, first.num_seen, second.num_seen),
        tl.where(condition, first.num_rejected, second.num_rejected),
        tl.where(condition, first.token, second.token), tl.where(condition, first.scale, second.scale),
        tl.where(condition, first.mass, second.mass), tl.where(condition, first.draft_mass, second.draft_mass),
    )  # fmt: skip


@triton.jit
def visit(rows, node, state, KEEPS_DRAFT: tl.constexpr):
    """Visits children from the State's on; returns the State at the first one that is accepted or rejected, or DRAWING.
    A State of another phase than VISITING comes back as it is."""
    tree = node.tree
    nodes = tl.arange(0, tree.links.shape[0])
    is_visiting = state.phase == VISITING
    phase = tl.where(is_visiting, DRAWING, state.phase)
    chosen = tl.where(is_visiting, 0, state.child)
    num_seen = state.num_seen
    child = tl.where(is_visiting, state.child, 0)
    while child > 0:
        is_child = nodes == child
        token = tl.sum(tl.where(is_child, tree.tokens, 0))
        following = tl.sum(tl.where(is_child, tree.links, 0)) & 0xFFFF
        num_seen += 1
        if (token >= 0) & (token < rows.num_ids):
            target_prob, draft_prob = left_probs(rows, node, state, token, KEEPS_DRAFT)
            coin = accept_coin(node.seed, tl.load(node.positions + child), child)
            is_drawn = draft_prob > 0.0
            is_accepted = (coin * draft_prob < target_prob) & is_drawn
            chosen = tl.where(is_drawn, child, 0)
            phase = tl.where(is_accepted, DONE, tl.where(is_drawn, REJECTING, DRAWING))
            following = tl.zeros_like(following)
        child = following
    return State(
        phase, chosen, num_seen, state.num_rejected, state.token, state.scale, state.mass, state.draft_mass
    )  # fmt: skip


@triton.jit
def settle(rows, node, state, mass, draft_mass, KEEPS_DRAFT: tl.constexpr):
    """Returns the State after the rejection that it is about, given the sums of the pass, and two things more.
    Whether the pass has drawn from what is left now; whether what is left of q wants a scale of its own, which one
    program can find out (`rescan_draft`)."""
    nodes = tl.arange(0, node.tree.links.shape[0])
    is_child = nodes == state.child
    token = tl.sum(tl.where(is_child, node.tree.tokens, 0))
    following = tl.sum(tl.where(is_child, node.tree.links, 0)) & 0xFFFF
    # nothing is left of p: then the child is accepted, if it can be
    is_spent = (mass > 0.0) == 0
    is_accepted = is_spent
    if is_spent:
        target_prob, _ = left_probs(rows, node, state, token, KEEPS_DRAFT)
        is_accepted = target_prob > 0.0
    phase = tl.where(is_accepted, DONE, VISITING)
    child = tl.where(is_accepted, state.child, following)
    scale, mass, draft_mass = masses_after(node, state, mass, draft_mass, KEEPS_DRAFT)
    is_small = child < 0
    if not (KEEPS_DRAFT or rows.draft.pointers.probs is not None):
        is_small = (draft_mass < SMALL_SHARE) & (node.is_certain == 0) & (phase == VISITING) & (child > 0)
    after = State(phase, child, state.num_seen, state.num_seen, state.token, scale, mass, draft_mass)
    return after, is_spent == 0, is_small


@triton.jit
def load_state(words_ptr):
    """Loads a State from its words."""
    return State(
        tl.load(words_ptr), tl.load(words_ptr + 1), tl.load(words_ptr + 2), tl.load(words_ptr + 3),
        tl.load(words_ptr + 4), tl.load(words_ptr + 5).to(tl.float32, bitcast=True),
        tl.load(words_ptr + 6).to(tl.float32, bitcast=True), tl.load(words_ptr + 7).to(tl.float32, bitcast=True),
    )  # fmt: skip


@triton.jit
def store_state(words_ptr, state):
    """Writes a State to its words."""
    tl.store(words_ptr, state.phase)
    tl.store(words_ptr + 1, state.child)
    tl.store(words_ptr + 2, state.num_seen)
    tl.store(words_ptr + 3, state.num_rejected)
    tl.store(words_ptr + 4, state.token)
    tl.store(words_ptr + 5, state.scale.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 6, state.mass.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 7, state.draft_mass.to(tl.int32, bitcast=True))


@triton.jit
def settle_found(rows, node, state, found, KEEPS_DRAFT: tl.constexpr):
    """Returns the State at the next pass, or DONE, given the sums and the key that a pass in slices has found."""
    mass, draft_mass, key = found
    after, has_drawn, is_small = settle(rows, node, state, mass, draft_mass, KEEPS_DRAFT)
    is_drawing = state.phase == DRAWING
    drawn = drawn_token(key)
    # what is left as it was is ALONE with its rejection
    phase = tl.where(is_drawing, DONE, tl.where(is_small, ALONE, after.phase))
    child = tl.where(is_drawing, 0, tl.where(is_small, state.child, after.child))
    num_rejected = tl.where(is_small, state.num_rejected, after.num_rejected)
    scale = tl.where(is_small, state.scale, after.scale)
    mass = tl.where(is_small, state.mass, after.mass)
    draft_mass = tl.where(is_small, state.draft_mass, after.draft_mass)
    going = State(phase, child, state.num_seen, num_rejected, drawn, scale, mass, draft_mass)
    at = visit(rows, node, going, KEEPS_DRAFT)
    is_over = has_drawn & (at.phase == DRAWING)  # the rejected child was the last one
    phase = tl.where(is_over, DONE, at.phase)
    return State(phase, at.child, at.num_seen, at.num_rejected, drawn, at.scale, at.mass, at.draft_mass)


@triton.jit
def finish_alone(rows, node, state, noise_key, KEEPS_DRAFT: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Takes all steps that are left at a node; returns the accepted child, 0 for none, and the drawn token."""
    maximum, total = node.pair.draft.maximum, node.pair.draft.total
    phase, child, num_seen, num_rejected = state.phase, state.child, state.num_seen, state.num_rejected
    scale, mass, draft_mass = state.scale, state.mass, state.draft_mass
    while (phase == REJECTING) | (phase == ALONE):
        now = _on_scale(node, maximum, total)
        before = State(phase * 0 + REJECTING, child, num_seen, num_rejected, state.token, scale, mass, draft_mass)
        passed = left_to_pass(now, before)
        new_mass, new_draft_mass = masses_left(rows, now, passed, KEEPS_DRAFT, BLOCK_VOCAB)
        after, _, is_small = settle(rows, now, before, new_mass, new_draft_mass, KEEPS_DRAFT)
        scale, draft_mass = after.scale, after.draft_mass
        if not (KEEPS_DRAFT or rows.draft.pointers.probs is not None):
            if is_small:
                new_maximum, new_total = rescan_draft(rows, now, passed, BLOCK_VOCAB)
                if new_total > 0.0:
                    scale *= tl.exp(new_maximum - maximum) * (new_total / total)
                    maximum = new_maximum
                    total = new_total
                draft_mass = tl.where(new_total > 0.0, 1.0, 0.0)
        after = State(
            after.phase, after.child, num_seen, after.num_rejected, state.token, scale, after.mass, draft_mass
        )  # fmt: skip
        at = visit(rows, _on_scale(node, maximum, total), after, KEEPS_DRAFT)
        phase, child, num_seen, num_rejected, mass = at.phase, at.child, at.num_seen, at.num_rejected, at.mass
    token = state.token
    if phase == DRAWING:
        last = State(phase, child, num_seen, num_rejected, token, scale, mass, draft_mass)
        now = _on_scale(node, maximum, total)
        token = draw_left(rows, now, last, noise_key, KEEPS_DRAFT, BLOCK_VOCAB)
    return child, token


@triton.jit
def _on_scale(node, maximum, total):
    """Returns the Node with other statistics of the draft's row."""
    draft = node.pair.draft
    row = Row(draft.row_ptr, draft.size, draft.scale, maximum, total, draft.best)
    pair = Pair(node.pair.target, row)
    return Node(pair, node.is_certain, node.tree, node.first_child, node.positions, node.seed)
