"""The steps of verify_tree_traversal: how a walk goes from one pass over the vocabulary to the next.

    descend  enters children until it has come to a leaf, which it accepts or deletes; reads single tokens only
    pass     sums what a deletion leaves of its parent's P and Q, and draws from it; or draws from the accepted node's P
    settle   takes a deletion into account, given the sums of the pass

A pass is made by one program, or by many of them in slices (`traversal_rounds.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.tree_walk import all_nodes
from ....runtime.language import tl, triton
from .deletions import (
    Latest,
    apply_deletions,
    deletions_of,
    draw_left,
    left_after,
    masses_left,
    no_deletion,
    store_deletion,
)
from .draws import accept_coin, draw_keys, drawn_token, residual_key
from .pair import load_pair, load_probs

# Phases of a walk.
DONE = tl.constexpr(0)  # the token after the path is drawn
DESCENDING = tl.constexpr(1)
DELETING = tl.constexpr(2)  # a child of the current node
DRAWING = tl.constexpr(3)  # the token after the current node, whose path is accepted

# Words of int32 scratch that an At takes, and a node's part of a Path.
AT_WORDS = 8
PATH_WORDS = 4
_AT_WORDS = tl.constexpr(AT_WORDS)

# A coin is keyed by depth * this + node. If the next round drafts for a position again, that position has another depth
# there, whatever the shapes of the trees; so no coin decides twice.
_NODES = tl.constexpr(65536)


class At(NamedTuple):
    """Where a walk is."""

    phase: Any
    current: Any  # node
    child: Any  # to be entered next; 0 for none
    accepted: Any  # depth of the current node
    acceptance: Any  # of the current node
    base: Any  # its deletions are base .. top - 1
    top: Any
    token: Any  # DELETING: of the deleted child; DONE: the drawn one


class Path(NamedTuple):
    """Of every node [node]; what is on the path to the current node, or was, has a meaning."""

    parents: Any  # int32
    acceptances: Any  # fp32, when the walk went below the node
    bases: Any  # int32
    is_entered: Any  # int1


class Edges(NamedTuple):
    """Of every node [node]: its probabilities in the rows of the node above it, before any deletion."""

    parents: Any  # int32: the node above; -1: not known, the rows must be read
    target: Any  # fp32
    draft: Any  # fp32


class Request(NamedTuple):
    """What one request's walk reads."""

    request: Any  # int64
    first_row: Any  # int64, of its nodes
    tree: Any  # Tree
    edges: Any  # Edges
    positions: Any  # pointer to those of its nodes
    seed: Any
    deletions_ptr: Any  # int32 [N, 4], a stack


@triton.jit
def first_at(of, is_live):
    """Returns the At of a walk at the root."""
    nodes = tl.arange(0, of.tree.links.shape[0])
    child = tl.sum(tl.where(nodes == 0, of.tree.links, 0)) >> 16
    none = child * 0
    # with a constant triton 3.6 finds that code for SPEC_STEPS 0 is dead, and fails on it
    accepted = tl.where(is_live, 0, -1)
    phase = tl.where(is_live, DESCENDING, DONE)
    return At(phase, none, child, accepted, tl.full([], 1.0, tl.float32), none, none, none)


@triton.jit
def first_path(tree):
    """Returns the Path of a walk at the root."""
    none = tree.links * 0
    return Path(none - 1, none.to(tl.float32) + 1.0, none, none < 0)


@triton.jit
def descend(rows, of, at, path, latest, SPEC_STEPS: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Goes on from a node to the next pass; returns At and Path there. A walk that is DONE stays where it is."""
    tree, edges = of.tree, of.edges
    nodes = tl.arange(0, tree.links.shape[0])
    parents, acceptances, bases, is_entered = path.parents, path.acceptances, path.bases, path.is_entered
    current, child, accepted, acceptance = at.current, at.child, at.accepted, at.acceptance
    base, top = at.base, at.top
    is_going = at.phase == DESCENDING
    is_entering = is_going
    while is_entering:
        is_child = nodes == child
        child_links = tl.sum(tl.where(is_child, tree.links, 0))
        is_new = (child > 0) & (tl.max((is_child & is_entered).to(tl.int32)) == 0)
        is_entering = (is_new & (accepted < SPEC_STEPS)) & (acceptance > 0.0)
        if is_entering:
            is_entered = is_entered | is_child
            token = tl.sum(tl.where(is_child, tree.tokens, 0))
            target_prob = tl.sum(tl.where(is_child, edges.target, 0.0))
            draft_prob = tl.sum(tl.where(is_child, edges.draft, 0.0))
            if tl.sum(tl.where(is_child, edges.parents, 0)) != current:
                row = of.first_row + current
                pair = load_pair(rows, of.request, row, child > 0, NUM_SLICES)
                target_prob, draft_prob = load_probs(rows, pair, token, token >= 0)
            deletions = deletions_of(of.deletions_ptr, base, top, latest)
            target_prob, draft_prob = apply_deletions(target_prob, draft_prob, token, deletions)
            is_drawn = draft_prob > 0.0
            ratio = tl.math.div_rn(target_prob, tl.where(is_drawn, draft_prob, 1.0))
            is_left = nodes == tl.where(is_drawn, current, -1)
            is_reached = nodes == tl.where(is_drawn, child, -1)
            acceptances = tl.where(is_left, acceptance, acceptances)
            parents = tl.where(is_reached, current, parents)
            bases = tl.where(is_reached, top, bases)
            acceptance = tl.where(is_drawn, tl.minimum(acceptance * ratio, 1.0), acceptance)
            base = tl.where(is_drawn, top, base)
            accepted += is_drawn.to(tl.int32)
            current = tl.where(is_drawn, child, current)
            child = tl.where(is_drawn, child_links >> 16, child_links & 0xFFFF)
    # a leaf, by now
    coin = accept_coin(of.seed, tl.load(of.positions + current), accepted * _NODES + current)
    is_deleted = is_going & ((current > 0) & (coin >= acceptance))
    is_current = nodes == current
    token = tl.where(is_deleted, tl.sum(tl.where(is_current, tree.tokens, 0)), at.token)
    child = tl.where(is_deleted, tl.sum(tl.where(is_current, tree.links, 0)) & 0xFFFF, child)
    parent = tl.sum(tl.where(is_current, parents, 0))
    current = tl.where(is_deleted, parent, current)
    accepted -= is_deleted.to(tl.int32)
    # a deleted node's own deletions are dropped
    top = tl.where(is_deleted, base, top)
    is_current = nodes == current
    base = tl.where(is_deleted, tl.sum(tl.where(is_current, bases, 0)), base)
    acceptance = tl.where(is_deleted, tl.sum(tl.where(is_current, acceptances, 0.0)), acceptance)
    phase = tl.where(is_going, tl.where(is_deleted, DELETING, DRAWING), at.phase)
    reached = At(phase, current, child, accepted, acceptance, base, top, token)
    return reached, Path(parents, acceptances, bases, is_entered)


@triton.jit
def settle(at, target_mass, draft_mass):
    """Returns the At after the deletion of a child of the current node, given the sums of its pass; and the Latest."""
    latest = Latest(at.top, at.acceptance, target_mass, draft_mass, at.token)
    divisor = target_mass + (1.0 - at.acceptance)
    has_chance = divisor > 0.0
    chance = tl.math.div_rn(target_mass, tl.where(has_chance, divisor, 1.0))
    acceptance = tl.where(has_chance, chance, 1.0)
    phase = tl.where(at.phase == DELETING, DESCENDING, at.phase)
    return At(phase, at.current, at.child, at.accepted, acceptance, at.base, at.top + 1, at.token), latest


@triton.jit
def settle_found(rows, of, at, path, found, SPEC_STEPS: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Returns At and Path at the next pass, or DONE, and the Latest, given what a pass in slices has found."""
    target_mass, draft_mass, key = found
    after, latest = settle(at, target_mass, draft_mass)
    is_deleting = at.phase == DELETING
    phase = tl.where(is_deleting, DESCENDING, DONE)
    token = drawn_token(key)
    acceptance = tl.where(is_deleting, after.acceptance, at.acceptance)
    top = tl.where(is_deleting, after.top, at.top)
    slot = tl.where(is_deleting, latest.slot, -1)
    latest = Latest(slot, latest.acceptance, target_mass, draft_mass, latest.token)
    going = At(phase, at.current, at.child, at.accepted, acceptance, at.base, top, token)
    to, path = descend(rows, of, going, path, latest, SPEC_STEPS, NUM_SLICES)
    # accepted where the child was deleted: the pass has drawn already, if it has left anything
    has_drawn = (to.phase == DRAWING) & (to.current == at.current) & (target_mass > 0.0)
    phase = tl.where(has_drawn, DONE, to.phase)
    token = tl.where(phase == DONE, token, to.token)
    return At(phase, to.current, to.child, to.accepted, to.acceptance, to.base, to.top, token), path, latest


@triton.jit
def finish_alone(rows, of, at, path, SPEC_STEPS: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Takes all steps that are left; returns the accepted node, its depth, the token after it, and all parents."""
    nothing = no_deletion()
    phase, current, child, accepted = at.phase, at.current, at.child, at.accepted
    acceptance, base, top, token = at.acceptance, at.base, at.top, at.token
    parents, acceptances, bases, is_entered = path.parents, path.acceptances, path.bases, path.is_entered
    while phase == DELETING:
        row = of.first_row + current
        pair = load_pair(rows, of.request, row, current >= 0, NUM_SLICES)
        before = deletions_of(of.deletions_ptr, base, top, nothing)
        target_mass, draft_mass = masses_left(rows, pair, before, acceptance, token, BLOCK_VOCAB)
        here = At(phase, current, child, accepted, acceptance, base, top, token)
        after, latest = settle(here, target_mass, draft_mass)
        store_deletion(of.deletions_ptr, latest)
        to, passed = descend(
            rows, of, after, Path(parents, acceptances, bases, is_entered), nothing, SPEC_STEPS, NUM_SLICES
        )
        phase, current, child, accepted = to.phase, to.current, to.child, to.accepted
        acceptance, base, top, token = to.acceptance, to.base, to.top, to.token
        parents, acceptances, bases = passed.parents, passed.acceptances, passed.bases
        is_entered = passed.is_entered
    if phase == DRAWING:
        row = of.first_row + current
        pair = load_pair(rows, of.request, row, top > base, NUM_SLICES)
        noise_key = residual_key(of.seed, tl.load(of.positions + current).to(tl.int64) + 1)
        deletions = deletions_of(of.deletions_ptr, base, top, nothing)
        # no token of the draft's alone has a P
        token = draw_left(rows, pair, deletions, noise_key, pair.target.size, BLOCK_VOCAB)
    return current, accepted, token, parents


@triton.jit
def pass_tile(rows, of, at, latest, ids, NUM_SLICES: tl.constexpr):
    """Returns what a pass sums of a tile of tokens (what the deletion leaves of P and Q), and the keys of its draw."""
    is_deleting = at.phase == DELETING
    reads_draft = is_deleting | (at.top > at.base)
    row = of.first_row + at.current
    pair = load_pair(rows, of.request, row, reads_draft, NUM_SLICES)
    target, draft = load_probs(rows, pair, ids, ids < rows.num_ids)
    deletions = deletions_of(of.deletions_ptr, at.base, at.top, latest)
    target, draft = apply_deletions(target, draft, ids, deletions)
    target_left, draft_left = left_after(target, draft, ids, at.acceptance, at.token)
    target_left = tl.where(is_deleting, target_left, target)
    noise_key = residual_key(of.seed, tl.load(of.positions + at.current).to(tl.int64) + 1)
    return target_left, draft_left, draw_keys(target_left, ids, noise_key)


@triton.jit
def load_walk(words_ptr, NUM_NODES: tl.constexpr):
    """Loads At and Path from the words [8 + 4 N] of a walk."""
    at = At(
        tl.load(words_ptr), tl.load(words_ptr + 1), tl.load(words_ptr + 2), tl.load(words_ptr + 3),
        tl.load(words_ptr + 4).to(tl.float32, bitcast=True),
        tl.load(words_ptr + 5), tl.load(words_ptr + 6), tl.load(words_ptr + 7),
    )  # fmt: skip
    node = all_nodes(NUM_NODES)
    is_node = node < NUM_NODES
    words_ptr += _AT_WORDS + node
    parents = tl.load(words_ptr, mask=is_node, other=-1)
    acceptances = tl.load(words_ptr + NUM_NODES, mask=is_node, other=0).to(tl.float32, bitcast=True)
    bases = tl.load(words_ptr + 2 * NUM_NODES, mask=is_node, other=0)
    is_entered = tl.load(words_ptr + 3 * NUM_NODES, mask=is_node, other=0) > 0
    return at, Path(parents, acceptances, bases, is_entered)


@triton.jit
def store_walk_words(words_ptr, at, path, NUM_NODES: tl.constexpr):
    """Writes At and Path to the words of a walk."""
    tl.store(words_ptr, at.phase)
    tl.store(words_ptr + 1, at.current)
    tl.store(words_ptr + 2, at.child)
    tl.store(words_ptr + 3, at.accepted)
    tl.store(words_ptr + 4, at.acceptance.to(tl.int32, bitcast=True))
    tl.store(words_ptr + 5, at.base)
    tl.store(words_ptr + 6, at.top)
    tl.store(words_ptr + 7, at.token)
    node = all_nodes(NUM_NODES)
    is_node = node < NUM_NODES
    words_ptr += _AT_WORDS + node
    tl.store(words_ptr, path.parents, mask=is_node)
    tl.store(words_ptr + NUM_NODES, path.acceptances.to(tl.int32, bitcast=True), mask=is_node)
    tl.store(words_ptr + 2 * NUM_NODES, path.bases, mask=is_node)
    tl.store(words_ptr + 3 * NUM_NODES, path.is_entered.to(tl.int32), mask=is_node)
