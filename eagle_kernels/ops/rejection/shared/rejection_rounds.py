"""The launches of verify_tree_rejection: many programs make a pass over one row, in slices; then one walks a tree.

In a round every node that is not done makes one pass (`rejection_steps.py`). All programs of a node first settle what
the round before found, visit children, and then pass over their slice; the first one hands the node's State on. After a
fixed number of rounds the program that walks the tree finishes what is left, seldom more than to merge the last round.

Nodes do not depend on each other, so either all nodes of the trees make their rounds at once, or, where that is too
much to read, only the one that each walk has reached, level by level. The bits are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import largest_key
from ....primitives.rows import GREEDY_BELOW, Rows, in_units, store_no_scan, store_scan
from ....primitives.tree_walk import Walk, all_nodes, is_own, load_nodes, store_walk
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .draws import draw_keys, residual_key
from .pair import PairRows
from .prepare_pair import SLICE_TUNING
from .rejection import load_left
from .rejection_steps import (
    ALONE,
    DONE,
    DRAWING,
    REJECTING,
    STATE_WORDS,
    finish_alone,
    first_state,
    left_to_pass,
    load_state,
    open_node,
    select_state,
    settle_found,
    store_state,
    visit,
)
from .slices import allocate_found, merge_found, store_found, store_nothing, turn

_WORDS = tl.constexpr(STATE_WORDS)
# sizes of the kernels that are not compiled anew for them
_SIZES = ["round", "level", "num_places", "num_ids", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"]

# Without replacement: so few registers that two programs fit in a multiprocessor, which costs no spills.
REGISTER_TUNING = {"default": {}, "sm_90": {"maxnreg": 128}}


class Scratch(NamedTuple):
    """Pointers to what a launch leaves for the next. A place is a node, or level by level the one reached."""

    states: Any  # int32 [2, places, 8], see store_state; None, as are the next two: there are no rounds
    sums: Any  # see allocate_found
    keys: Any
    depth: Any  # int32 [B, N], level by level only: of the nodes on the path, else -1
    emitted: Any  # int32 [B, N], likewise: the tokens after them


@triton.jit
def reached_node(scratch, links, request, level, NUM_NODES: tl.constexpr):
    """Returns the node of a level at which the walk has arrived, -1 if it has ended."""
    node = all_nodes(NUM_NODES)
    first = request * NUM_NODES
    depth = tl.load(scratch.depth + first + node, mask=(node < NUM_NODES) & (level > 0), other=-1)
    root = tl.load(links.retrieve_index + first).to(tl.int64)
    start = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    return tl.where(level == 0, start, tl.max(tl.where(depth == level, node, -1)))


@triton.jit
def load_node(links, request, current, NUM_NODES: tl.constexpr):
    """Loads the request's Tree; also returns a node's first child, and whether the node is the request's own.
    No walk comes to a node of another request."""
    tree = load_nodes(links, request, NUM_NODES)
    is_node = all_nodes(NUM_NODES) == current
    child = tl.sum(tl.where(is_node, tree.links, 0)) >> 16
    return tree, child, tl.max((is_node & is_own(tree.retrieved, request, NUM_NODES)).to(tl.int32)) > 0


@triton.jit(do_not_specialize=["level", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_tree_rejection_scan_kernel(
    links, target, draft, scratch, level, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, KEEPS_DRAFT: tl.constexpr, SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one slice of both rows of the node that a walk has reached.
    The scans have the numbers of their requests."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(target.temperature + request)
    draft_temperature = tl.load(draft.temperature + request)
    node = reached_node(scratch, links, request, level, NUM_NODES)
    row = request * NUM_NODES + tl.maximum(node, 0)
    if target.scans is not None:
        rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), request - row)
        if node >= 0:
            store_scan(rows, row, temperature, part, NUM_SLICES, BLOCK_VOCAB)
        else:
            store_no_scan(rows, row, part, NUM_SLICES)
    if draft.scans is not None:
        rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), request - row)
        is_read = (node >= 0) & (level < SPEC_STEPS) & (tl.load(links.retrieve_next_token + row) > 0)
        if not KEEPS_DRAFT:
            is_read = is_read & (draft_temperature >= GREEDY_BELOW)
        if is_read:
            store_scan(rows, row, draft_temperature, part, NUM_SLICES, BLOCK_VOCAB)
        else:
            store_no_scan(rows, row, part, NUM_SLICES)


@triton.jit(do_not_specialize=_SIZES)
def _verify_tree_rejection_round_kernel(
    links, target, draft, target_to_draft_ptr, coins, scratch,
    round, level, num_places, num_ids, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, KEEPS_DRAFT: tl.constexpr, IS_FIRST: tl.constexpr,
    BY_LEVEL: tl.constexpr, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Makes one pass over one slice of the rows of a place's node; its State is handed on from round to round."""
    await_predecessor(ENABLE_PDL)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    to = turn(round, num_places) + place
    since = turn(round + 1, num_places) + place
    if BY_LEVEL:
        request = place
        current = reached_node(scratch, links, request, level, NUM_NODES)
    else:
        request = place // NUM_NODES
        current = (place % NUM_NODES).to(tl.int32)
    is_open = current >= 0
    # Loads do not wait for the State, which tells whether they are needed: programs wait for memory once less. Level by
    # level most of them have nothing to do, and leave first.
    if not BY_LEVEL:
        tree, child, is_own_node = load_node(links, request, current, NUM_NODES)
        is_open = is_own_node
    if IS_FIRST:
        state = first_state(tl.zeros([], tl.int32) if BY_LEVEL else child)
    else:
        state = load_state(scratch.states + since * _WORDS)
        is_open = is_open & (state.phase != DONE) & (state.phase != ALONE)
    if is_open | (not BY_LEVEL):
        if BY_LEVEL:
            tree, child, is_own_node = load_node(links, request, current, NUM_NODES)
            child = tl.where(level < SPEC_STEPS, child, 0)
            is_open &= is_own_node
        row = request * NUM_NODES + current
        scan = request - row if BY_LEVEL else 0  # by level scans have the numbers of their requests
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), scan)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), scan)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
        node = open_node(
            rows, tree, request, current, child, coins, KEEPS_DRAFT, NUM_NODES, NUM_SLICES=NUM_SLICES,
            BLOCK_VOCAB=BLOCK_VOCAB,
        )  # fmt: skip
        if not IS_FIRST:
            found = merge_found(scratch, since, NUM_SLICES)
        if is_open:
            if IS_FIRST:
                at = visit(rows, node, first_state(child) if BY_LEVEL else state, KEEPS_DRAFT)
            else:
                at = settle_found(rows, node, state, found, KEEPS_DRAFT)
            if part == 0:
                store_state(scratch.states + to * _WORDS, at)
            if (at.phase == REJECTING) | (at.phase == DRAWING):
                ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
                target_left, draft_left = load_left(rows, node, left_to_pass(node, at), ids, ids < num_ids, KEEPS_DRAFT)
                noise_key = residual_key(node.seed, tl.load(node.positions + current).to(tl.int64) + 1)
                keys = draw_keys(target_left, ids, noise_key)
                store_found(scratch, to, part, tl.sum(target_left), tl.sum(draft_left), largest_key(keys), NUM_SLICES)
            else:
                store_nothing(scratch, to, part, NUM_SLICES)
        else:
            _hand_on(scratch, to, part, state, NUM_SLICES)
    else:
        _hand_on(scratch, to, part, state, NUM_SLICES)


@triton.jit
def _hand_on(scratch, to, part, state, NUM_SLICES: tl.constexpr):
    """Writes what a slice has whose node makes no pass: nothing, and the State as it was."""
    store_nothing(scratch, to, part, NUM_SLICES)
    if part == 0:
        store_state(scratch.states + to * _WORDS, state)


@triton.jit(do_not_specialize=_SIZES)
def _verify_tree_rejection_walk_kernel(
    links, target, draft, target_to_draft_ptr, coins, scratch, out,
    round, level, num_places, num_ids, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, KEEPS_DRAFT: tl.constexpr, BY_LEVEL: tl.constexpr,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Walks one tree, or with BY_LEVEL takes its step from this level on, and writes the outputs.
    What the rounds have not done at a node is done here."""
    await_predecessor(ENABLE_PDL)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    HAS_ROUNDS: tl.constexpr = scratch.states is not None
    request = tl.program_id(0).to(tl.int64)
    nodes = all_nodes(NUM_NODES)
    is_node = nodes < NUM_NODES
    first = request * NUM_NODES
    since = turn(round + 1, num_places)
    if HAS_ROUNDS:
        # what the rounds have found of all nodes, so that the walk waits for memory once
        places = request + 0 * nodes if BY_LEVEL else first + nodes
        words_ptr = scratch.states + (since + places) * _WORDS
        phases = tl.load(words_ptr, mask=is_node, other=0)
        children_found = tl.load(words_ptr + 1, mask=is_node, other=0)
        tokens_found = tl.load(words_ptr + 4, mask=is_node, other=0)
    tree = load_nodes(links, request, NUM_NODES)
    depth = tl.where((nodes == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    emitted = tl.full(nodes.shape, -1, tl.int32)
    # 0 but for BY_LEVEL; with a constant triton 3.6 finds that code for SPEC_STEPS 0 is dead, and fails on it
    accepted = level
    if BY_LEVEL:
        is_later = is_node & (level > 0)
        depth = tl.where(is_later, tl.load(scratch.depth + first + nodes, mask=is_later, other=-1), depth)
        emitted = tl.load(scratch.emitted + first + nodes, mask=is_later, other=-1)
    current = tl.max(tl.where(depth == accepted, nodes, -1))
    is_walking = current >= 0
    while is_walking:
        is_current = nodes == current
        first_child = tl.sum(tl.where(is_current, tree.links, 0)) >> 16
        child = tl.where(accepted < SPEC_STEPS, first_child, 0)
        chosen = tl.zeros([], tl.int32)
        token = tl.zeros([], tl.int32)
        is_done = chosen > 0
        if HAS_ROUNDS:
            # all nodes at once do not know which of them is as deep as a walk may come
            is_known = BY_LEVEL or child == first_child
            is_done = is_known & (tl.sum(tl.where(is_current, phases, 0)) == DONE)
            chosen = tl.sum(tl.where(is_current, children_found, 0))
            token = tl.sum(tl.where(is_current, tokens_found, 0))
        if is_done == 0:
            row = first + current
            scan = request - row if BY_LEVEL else 0  # by level scans have the numbers of their requests
            target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), scan)
            draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), scan)
            rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
            node = open_node(
                rows, tree, request, current, child, coins, KEEPS_DRAFT, NUM_NODES, NUM_SLICES=NUM_SLICES,
                BLOCK_VOCAB=BLOCK_VOCAB,
            )  # fmt: skip
            fresh = visit(rows, node, first_state(child), KEEPS_DRAFT)
            if HAS_ROUNDS:
                place = since + (request if BY_LEVEL else row)
                left = load_state(scratch.states + place * _WORDS)
                settled = settle_found(rows, node, left, merge_found(scratch, place, NUM_SLICES), KEEPS_DRAFT)
                at = select_state(is_known, select_state(left.phase == ALONE, left, settled), fresh)
            else:
                at = fresh
            noise_key = residual_key(node.seed, tl.load(node.positions + current).to(tl.int64) + 1)
            chosen, token = finish_alone(rows, node, at, noise_key, KEEPS_DRAFT, BLOCK_VOCAB)
        token = tl.where(chosen > 0, tl.sum(tl.where(nodes == chosen, tree.tokens, 0)), token)
        emitted = tl.where(is_current, token, emitted)
        accepted += (chosen > 0).to(tl.int32)
        depth = tl.where((nodes == chosen) & (chosen > 0), accepted, depth)
        is_walking = (chosen > 0) & (BY_LEVEL == 0)
        current = chosen
    if BY_LEVEL:
        tl.debug_barrier()  # other threads may still read what stood there
        tl.store(scratch.depth + first + nodes, depth, mask=is_node)
        tl.store(scratch.emitted + first + nodes, emitted, mask=is_node)
    store_walk(out, request, Walk(tree.retrieved, emitted, depth), SPEC_STEPS, NUM_NODES)


def allocate_rounds(candidates: torch.Tensor, num_places: int, num_slices: int, by_level: bool) -> Scratch:
    """Allocates what rounds hand on; nothing for 0 places."""
    if num_places == 0:
        return Scratch(None, None, None, None, None)
    device, depth, emitted = candidates.device, None, None
    if by_level:
        depth, emitted = (torch.empty(candidates.shape, dtype=torch.int32, device=device) for _ in range(2))
    states = torch.empty((2, num_places, STATE_WORDS), dtype=torch.int32, device=device)
    return Scratch(states, *allocate_found(num_places, num_slices, device), depth, emitted)


def launch_rounds_and_walks(shared: dict, walk: dict, num_rounds: int) -> None:
    """Launches the rounds of all nodes, then the walks; with BY_LEVEL those of the nodes reached at one level after the
    other, after a scan of their rows. walk: what the walk's kernel takes besides the shared arguments."""
    op, device = "verify_tree_rejection", shared["links"].candidates.device
    grid, tuned = (shared["num_places"], shared["NUM_SLICES"]), tuning.row(SLICE_TUNING, device)
    rounds = shared | tuned | ({} if shared["KEEPS_DRAFT"] else tuning.row(REGISTER_TUNING, device))
    has_logits = shared["target"].scans is not None or shared["draft"].scans is not None
    for level in range(shared["SPEC_STEPS"] + 1) if shared["BY_LEVEL"] else (0,):
        if shared["BY_LEVEL"] and has_logits:
            names = _verify_tree_rejection_scan_kernel.arg_names
            scan = tuned | {name: value for name, value in shared.items() if name in names}
            launch(op, _verify_tree_rejection_scan_kernel, grid, level=level, **scan)
        for round in range(num_rounds):
            now = {"round": round, "level": level, "IS_FIRST": round == 0}
            launch(op, _verify_tree_rejection_round_kernel, grid, **rounds, **now)
        last = shared | walk | {"round": num_rounds, "level": level}
        launch(op, _verify_tree_rejection_walk_kernel, (len(shared["links"].candidates),), **last)
