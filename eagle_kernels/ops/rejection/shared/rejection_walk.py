"""The last launch of verify_tree_rejection: one program walks one tree, and does alone what rounds have left to do."""

from __future__ import annotations

from ....primitives.dependent_launch import await_predecessor
from ....primitives.rows import Rows, in_units
from ....primitives.tree_walk import Walk, all_nodes, is_own, load_nodes, store_walk
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .draws import residual_key
from .pair import PairRows
from .rejection_steps import (
    ALONE,
    DONE,
    STATE_WORDS,
    finish_alone,
    first_state,
    load_state,
    open_node,
    select_state,
    settle_found,
    visit,
)
from .slices import merge_found, turn

_WORDS = tl.constexpr(STATE_WORDS)


@triton.jit(
    do_not_specialize=[
        "round", "level", "num_places", "num_ids", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft",
    ]
)  # fmt: skip
def _verify_tree_rejection_walk_kernel(
    # inputs
    links,
    target,
    draft,
    target_to_draft_ptr,
    coins,
    # scratch
    scratch,
    # outputs
    out,
    # sizes
    round,
    level,
    num_places,
    num_ids,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    KEEPS_DRAFT: tl.constexpr,
    BY_LEVEL: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Walks one tree, or with BY_LEVEL takes its step from this level on, and writes the outputs.

    What the rounds have not done at a node is done here.
    """
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


def launch_walk(batch_size: int, arguments: dict) -> None:
    """Launches the walks of all requests; round: the number of rounds made."""
    launch("verify_tree_rejection", _verify_tree_rejection_walk_kernel, (batch_size,), **arguments)
