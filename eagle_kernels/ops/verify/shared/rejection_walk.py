"""The last launch of verify_tree_rejection: one program walks one tree, and does alone what rounds have left to do."""

from __future__ import annotations

from ....primitives.dependent_launch import await_predecessor
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
from .rows import Rows, in_units
from .slices import Found, merge_found, turn
from .tree_walk import Links, Output, Walk, is_own, load_nodes, store_walk

_WORDS = tl.constexpr(STATE_WORDS)


@triton.jit(
    do_not_specialize=[
        "round", "level", "num_places", "num_ids", "num_target_scans", "vocab_size", "draft_vocab_size",
        "stride_target", "stride_draft",
    ]
)  # fmt: skip
def _verify_tree_rejection_walk_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_ptr,
    draft_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    # scratch
    scans_ptr,
    depth_ptr,
    emitted_ptr,
    states_ptr,
    sums_ptr,
    keys_ptr,
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    round,
    level,
    num_places,
    num_ids,
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    KEEPS_DRAFT: tl.constexpr,
    HAS_ROUNDS: tl.constexpr,
    BY_LEVEL: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Walks one tree, or with BY_LEVEL takes its step from this level on, and writes the outputs.

    What the rounds have not done at a node is done here.
    """
    await_predecessor(ENABLE_PDL)
    vocab_size, stride_target = in_units(vocab_size, TARGET_UNIT), in_units(stride_target, TARGET_UNIT)
    draft_vocab_size, stride_draft = in_units(draft_vocab_size, DRAFT_UNIT), in_units(stride_draft, DRAFT_UNIT)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_NODE)
    is_node = nodes < NUM_NODES
    first = request * NUM_NODES
    since = turn(round + 1, num_places)
    if HAS_ROUNDS:
        # what the rounds have found of all nodes, so that the walk waits for memory once
        places = request + 0 * nodes if BY_LEVEL else first + nodes
        words_ptr = states_ptr + (since + places) * _WORDS
        phases = tl.load(words_ptr, mask=is_node, other=0)
        children_found = tl.load(words_ptr + 1, mask=is_node, other=0)
        tokens_found = tl.load(words_ptr + 4, mask=is_node, other=0)
    trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    tree = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
    depth = tl.where((nodes == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    emitted = tl.full([BLOCK_NODE], -1, tl.int32)
    # 0 but for BY_LEVEL; with a constant triton 3.6 finds that code for SPEC_STEPS 0 is dead, and fails on it
    accepted = level
    if BY_LEVEL:
        is_later = is_node & (level > 0)
        depth = tl.where(is_later, tl.load(depth_ptr + first + nodes, mask=is_later, other=-1), depth)
        emitted = tl.load(emitted_ptr + first + nodes, mask=is_later, other=-1)
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
            first_scan = request - row if BY_LEVEL else row * 0
            target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, first_scan)
            first_draft_scan = first_scan + num_target_scans
            draft_rows = Rows(
                draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, first_draft_scan
            )  # fmt: skip
            rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
            node = open_node(
                rows, tree, request, current, child, (positions_ptr, seeds_ptr), TARGET_IS_PROBS, DRAFT_IS_PROBS,
                KEEPS_DRAFT=KEEPS_DRAFT, NUM_NODES=NUM_NODES, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE,
                BLOCK_VOCAB=BLOCK_VOCAB, HAS_SCANS=HAS_ROUNDS,
            )  # fmt: skip
            fresh = visit(node, first_state(child), TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
            if HAS_ROUNDS:
                place = since + (request if BY_LEVEL else row)
                left = load_state(states_ptr + place * _WORDS)
                found = merge_found(Found(sums_ptr, keys_ptr), place, NUM_SLICES, BLOCK_SLICE)
                settled = settle_found(node, left, found, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
                at = select_state(is_known, select_state(left.phase == ALONE, left, settled), fresh)
            else:
                at = fresh
            noise_key = residual_key(node.seed, tl.load(node.positions + current).to(tl.int64) + 1)
            chosen, token = finish_alone(node, at, noise_key, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT, BLOCK_VOCAB)
        token = tl.where(chosen > 0, tl.sum(tl.where(nodes == chosen, tree.tokens, 0)), token)
        emitted = tl.where(is_current, token, emitted)
        accepted += (chosen > 0).to(tl.int32)
        depth = tl.where((nodes == chosen) & (chosen > 0), accepted, depth)
        is_walking = (chosen > 0) & (BY_LEVEL == 0)
        current = chosen
    if BY_LEVEL:
        tl.debug_barrier()  # other threads may still read what stood there
        tl.store(depth_ptr + first + nodes, depth, mask=is_node)
        tl.store(emitted_ptr + first + nodes, emitted, mask=is_node)
    out = Output(predicts_ptr, accept_index_ptr, accept_token_num_ptr)
    walk = Walk(tree.retrieved, emitted, depth)
    store_walk(out, request, walk, SPEC_STEPS, NUM_NODES, False, BLOCK_DEPTH)


def launch_walk(batch_size: int, arguments: dict) -> None:
    """Launches the walks of all requests; round: the number of rounds made."""
    launch("verify_tree_rejection", _verify_tree_rejection_walk_kernel, (batch_size,), **arguments)
