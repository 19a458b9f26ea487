"""The launches of verify_tree_rejection that read rows in slices: many programs make a pass over one row.

In a round every node that is not done makes one pass (`rejection_steps.py`). All programs of a node first settle what
the round before found, visit children, and then pass over their slice; the first one hands the node's State on. After a
fixed number of rounds a program finishes what is left alone, which is seldom more than the merging of the last round.

Nodes do not depend on each other, so either all nodes of the trees make their rounds at once, or, where that is too
much to read, only the one that each walk has reached, level by level. The bits are the same.
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
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
    first_state,
    left_to_pass,
    load_state,
    open_node,
    settle_found,
    store_state,
    visit,
)
from .rows import GREEDY_BELOW, Rows, in_units, store_no_scan, store_scan
from .slices import Found, allocate_found, merge_found, store_found, store_nothing, turn
from .tree_walk import Links, is_own, load_nodes

_WORDS = tl.constexpr(STATE_WORDS)


@triton.jit
def reached_node(depth_ptr, retrieve_index_ptr, request, level, NUM_NODES: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Returns the node of a level at which the walk has arrived, -1 if it has ended."""
    node = tl.arange(0, BLOCK_NODE)
    first = request * NUM_NODES
    depth = tl.load(depth_ptr + first + node, mask=(node < NUM_NODES) & (level > 0), other=-1)
    root = tl.load(retrieve_index_ptr + first).to(tl.int64)
    start = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    return tl.where(level == 0, start, tl.max(tl.where(depth == level, node, -1)))


@triton.jit
def load_node(links, request, current, NUM_NODES: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Loads the request's Tree; also returns a node's first child, and whether the node is the request's own.

    No walk comes to a node of another request.
    """
    tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    is_node = tl.arange(0, BLOCK_NODE) == current
    child = tl.sum(tl.where(is_node, tree.links, 0)) >> 16
    return tree, child, tl.max((is_node & is_own(tree.retrieved, request, NUM_NODES)).to(tl.int32)) > 0


@triton.jit(
    do_not_specialize=["level", "num_target_scans", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"]
)
def _verify_tree_rejection_scan_kernel(
    # inputs
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    # scratch
    depth_ptr,
    scans_ptr,
    # sizes
    level,
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
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the statistics of one slice of both rows of the node that a walk has reached: scans [.., 3, slices].

    Those of the target have the numbers of their requests, those of the draft come after them.
    """
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + request)
    draft_temperature = tl.load(draft_temperature_ptr + request)
    node = reached_node(depth_ptr, retrieve_index_ptr, request, level, NUM_NODES, BLOCK_NODE)
    row = request * NUM_NODES + tl.maximum(node, 0)
    scans_ptr += request * (3 * NUM_SLICES)
    if not TARGET_IS_PROBS:
        if node >= 0:
            size, row_ptr = in_units(vocab_size, TARGET_UNIT), target_ptr + row * in_units(stride_target, TARGET_UNIT)
            store_scan(row_ptr, size, temperature, scans_ptr, part, NUM_SLICES, BLOCK_VOCAB)
        else:
            store_no_scan(scans_ptr, part, NUM_SLICES)
    if not DRAFT_IS_PROBS:
        scans_ptr += num_target_scans.to(tl.int64) * (3 * NUM_SLICES)
        is_read = (node >= 0) & (level < SPEC_STEPS) & (tl.load(retrieve_next_token_ptr + row) > 0)
        if not KEEPS_DRAFT:
            is_read = is_read & (draft_temperature >= GREEDY_BELOW)
        if is_read:
            size = in_units(draft_vocab_size, DRAFT_UNIT)
            row_ptr = draft_ptr + row * in_units(stride_draft, DRAFT_UNIT)
            store_scan(row_ptr, size, draft_temperature, scans_ptr, part, NUM_SLICES, BLOCK_VOCAB)
        else:
            store_no_scan(scans_ptr, part, NUM_SLICES)


@triton.jit(
    do_not_specialize=[
        "round", "level", "num_places", "num_ids", "num_target_scans", "vocab_size", "draft_vocab_size",
        "stride_target", "stride_draft",
    ]
)  # fmt: skip
def _verify_tree_rejection_round_kernel(
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
    states_ptr,
    sums_ptr,
    keys_ptr,
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
    IS_FIRST: tl.constexpr,
    BY_LEVEL: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Makes one pass over one slice of a node's rows; states [2, places, 8] are handed on from round to round.

    A place is a node, or with BY_LEVEL a request, whose node is the one that its walk has reached.
    """
    await_predecessor(ENABLE_PDL)
    vocab_size, stride_target = in_units(vocab_size, TARGET_UNIT), in_units(stride_target, TARGET_UNIT)
    draft_vocab_size, stride_draft = in_units(draft_vocab_size, DRAFT_UNIT), in_units(stride_draft, DRAFT_UNIT)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    to = turn(round, num_places) + place
    since = turn(round + 1, num_places) + place
    if BY_LEVEL:
        request = place
        current = reached_node(depth_ptr, retrieve_index_ptr, request, level, NUM_NODES, BLOCK_NODE)
    else:
        request = place // NUM_NODES
        current = (place % NUM_NODES).to(tl.int32)
    links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    buffers = Found(sums_ptr, keys_ptr)
    is_open = current >= 0
    # Loads do not wait for the State, which tells whether they are needed: programs wait for memory once less. Level by
    # level most of them have nothing to do, and leave first.
    if not BY_LEVEL:
        tree, child, is_own_node = load_node(links, request, current, NUM_NODES, BLOCK_NODE)
        is_open = is_own_node
    if IS_FIRST:
        state = first_state(tl.zeros([], tl.int32) if BY_LEVEL else child)
    else:
        state = load_state(states_ptr + since * _WORDS)
        is_open = is_open & (state.phase != DONE) & (state.phase != ALONE)
    if is_open | (not BY_LEVEL):
        if BY_LEVEL:
            tree, child, is_own_node = load_node(links, request, current, NUM_NODES, BLOCK_NODE)
            child = tl.where(level < SPEC_STEPS, child, 0)
            is_open &= is_own_node
        row = request * NUM_NODES + current
        first_scan = request - row if BY_LEVEL else row * 0
        target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, first_scan)
        draft_rows = Rows(
            draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, first_scan + num_target_scans
        )  # fmt: skip
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
        node = open_node(
            rows, tree, request, current, child, (positions_ptr, seeds_ptr), TARGET_IS_PROBS, DRAFT_IS_PROBS,
            KEEPS_DRAFT=KEEPS_DRAFT, NUM_NODES=NUM_NODES, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE,
            BLOCK_VOCAB=BLOCK_VOCAB, HAS_SCANS=True,
        )  # fmt: skip
        if not IS_FIRST:
            found = merge_found(buffers, since, NUM_SLICES, BLOCK_SLICE)
        if is_open:
            if IS_FIRST:
                first = first_state(child) if BY_LEVEL else state
                at = visit(node, first, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
            else:
                at = settle_found(node, state, found, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
            if part == 0:
                store_state(states_ptr + to * _WORDS, at)
            if (at.phase == REJECTING) | (at.phase == DRAWING):
                ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
                passed = left_to_pass(node, at)
                target, draft = load_left(
                    node, passed, ids, ids < node.num_ids, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT
                )  # fmt: skip
                noise_key = residual_key(node.seed, tl.load(node.positions + current).to(tl.int64) + 1)
                keys = draw_keys(target, ids, noise_key)
                store_found(buffers, to, part, target, draft, keys, NUM_SLICES)
            else:
                store_nothing(buffers, to, part, NUM_SLICES)
        else:
            _hand_on(buffers, states_ptr, to, part, state, NUM_SLICES)
    else:
        _hand_on(buffers, states_ptr, to, part, state, NUM_SLICES)


@triton.jit
def _hand_on(buffers, states_ptr, to, part, state, NUM_SLICES: tl.constexpr):
    """Writes what a slice has whose node makes no pass: nothing, and the State as it was."""
    store_nothing(buffers, to, part, NUM_SLICES)
    if part == 0:
        store_state(states_ptr + to * _WORDS, state)


def allocate_rounds(num_places: int, num_slices: int, device: torch.device) -> dict:
    """Returns the kernel arguments of the scratch that rounds of so many places take."""
    if num_places == 0:
        return {"states_ptr": None, "sums_ptr": None, "keys_ptr": None, "num_places": 0}
    states = torch.empty((2, num_places, STATE_WORDS), dtype=torch.int32, device=device)
    return {"states_ptr": states, **allocate_found(num_places, num_slices, device)}


def launch_rounds(shared: dict, num_rounds: int, level: int) -> None:
    """Launches all rounds of all nodes, or with BY_LEVEL of those that the walks have reached at a level."""
    tuned = tuning.row(SLICE_TUNING, shared["target_ptr"].device)
    for round in range(num_rounds):
        launch(
            "verify_tree_rejection",
            _verify_tree_rejection_round_kernel,
            (shared["num_places"], shared["NUM_SLICES"]),
            round=round,
            level=level,
            IS_FIRST=round == 0,
            **shared,
            **tuned,
        )


def allocate_level_scans(pair: dict, batch_size: int) -> tuple[torch.Tensor | None, int]:
    """Returns scratch for the scans of one level, and how many of them are the target's."""
    num_target_scans = 0 if pair["TARGET_IS_PROBS"] else batch_size
    num_scans = num_target_scans + (0 if pair["DRAFT_IS_PROBS"] else batch_size)
    if num_scans == 0:
        return None, 0
    shape = (num_scans, 3, pair["NUM_SLICES"])
    return torch.empty(shape, dtype=torch.int32, device=pair["target_ptr"].device), num_target_scans


def launch_level_scan(shared: dict, level: int) -> None:
    """Launches the scan of the rows of the nodes that the walks have reached at a level."""
    if shared["scans_ptr"] is None:
        return
    names = _verify_tree_rejection_scan_kernel.arg_names
    launch(
        "verify_tree_rejection",
        _verify_tree_rejection_scan_kernel,
        (shared["num_places"], shared["NUM_SLICES"]),
        level=level,
        **{name: value for name, value in shared.items() if name in names},
        **tuning.row(SLICE_TUNING, shared["target_ptr"].device),
    )
