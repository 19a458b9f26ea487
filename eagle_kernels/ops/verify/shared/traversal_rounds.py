"""The launches of verify_tree_traversal that read rows in slices: many programs make a pass over one row.

First the probabilities of every node in the rows above it are looked up, all at once (`Edges`). Then come rounds, in
each of which every walk makes one pass (`traversal_steps.py`). All programs of a request first settle what the round
before found, and descend to the next leaf, each by itself; then they pass over their slice. The first one hands the
walk on. After a fixed number of rounds a program finishes what is left alone.
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .deletions import no_deletion, store_deletion
from .pair import PairRows, load_pair, load_probs
from .prepare_pair import SLICE_TUNING
from .rows import Rows, in_units
from .slices import Found, allocate_found, merge_found, store_found, store_nothing, turn
from .traversal_steps import (
    AT_WORDS,
    DELETING,
    DONE,
    DRAWING,
    PATH_WORDS,
    Edges,
    Request,
    descend,
    first_at,
    first_path,
    load_walk,
    pass_tile,
    settle_found,
    store_walk_words,
)
from .tree_walk import Links, find_above, is_own, load_nodes

_WORDS = tl.constexpr(AT_WORDS)
_NODE_WORDS = tl.constexpr(PATH_WORDS)

EDGE_TUNING = {"default": {"num_warps": 1}}


@triton.jit(do_not_specialize=["num_target_scans", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_tree_traversal_edge_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    # scratch
    scans_ptr,
    edges_ptr,
    # sizes
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the edge of one node to edges [B, 3, N] int32: the node above it (-1 for none), p and q there."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    above, is_parent = find_above(tree.links, node)
    while (above > 0) & (is_parent == 0):
        above, is_parent = find_above(tree.links, above)
    parent = tl.where(is_parent, above, -1)
    target_prob = tl.zeros([], tl.float32)
    draft_prob = tl.zeros([], tl.float32)
    if parent >= 0:
        target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, 0)
        draft_rows = Rows(draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, num_target_scans)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, vocab_size)
        row = request * NUM_NODES + parent
        pair = load_pair(rows, request, row, parent >= 0, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS, DRAFT_IS_PROBS)
        token = tl.sum(tl.where(tl.arange(0, BLOCK_NODE) == node, tree.tokens, 0))
        target_prob, draft_prob = load_probs(pair, token, token >= 0, TARGET_IS_PROBS, DRAFT_IS_PROBS)
    edges_ptr += request * (3 * NUM_NODES) + node
    tl.store(edges_ptr, parent)
    tl.store(edges_ptr + NUM_NODES, target_prob.to(tl.int32, bitcast=True))
    tl.store(edges_ptr + 2 * NUM_NODES, draft_prob.to(tl.int32, bitcast=True))


@triton.jit
def open_request(
    links, edges_ptr, deletions_ptr, positions_ptr, seeds_ptr, NUM_NODES: tl.constexpr, BLOCK_NODE: tl.constexpr
):
    """Returns the Request of this program and whether its row is live; edges_ptr None: no edges are known."""
    request = tl.program_id(0).to(tl.int64)
    first = request * NUM_NODES
    tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    node = tl.arange(0, BLOCK_NODE)
    is_live = tl.max(((node == 0) & is_own(tree.retrieved, request, NUM_NODES)).to(tl.int32)) > 0
    if edges_ptr is None:
        edges = Edges(tree.links * 0 - 1, tree.links.to(tl.float32), tree.links.to(tl.float32))
    else:
        is_node = node < NUM_NODES
        edges_ptr += request * (3 * NUM_NODES) + node
        edges = Edges(
            tl.load(edges_ptr, mask=is_node, other=-1),
            tl.load(edges_ptr + NUM_NODES, mask=is_node, other=0).to(tl.float32, bitcast=True),
            tl.load(edges_ptr + 2 * NUM_NODES, mask=is_node, other=0).to(tl.float32, bitcast=True),
        )
    seed = tl.load(seeds_ptr + request)
    return Request(request, first, tree, edges, positions_ptr + first, seed, deletions_ptr + first * 4), is_live


@triton.jit(
    do_not_specialize=[
        "round", "num_places", "num_ids", "num_target_scans", "vocab_size", "draft_vocab_size", "stride_target",
        "stride_draft",
    ]
)  # fmt: skip
def _verify_tree_traversal_round_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    positions_ptr,
    seeds_ptr,
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    # scratch
    scans_ptr,
    edges_ptr,
    deletions_ptr,
    walks_ptr,
    sums_ptr,
    keys_ptr,
    # sizes
    round,
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
    IS_FIRST: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Makes one pass of one walk over one slice; walks [2, B, 8 + 4 N] are handed on from round to round.

    deletions [B, N, 4] is a stack: the deletions of the nodes of the current path, in order. A deleted node's own
    deletions are dropped, so those of a node of the path lie side by side, after its parent's. The one that a round has
    settled is written in it and read from there in later rounds only.
    """
    await_predecessor(ENABLE_PDL)
    vocab_size, stride_target = in_units(vocab_size, TARGET_UNIT), in_units(stride_target, TARGET_UNIT)
    draft_vocab_size, stride_draft = in_units(draft_vocab_size, DRAFT_UNIT), in_units(stride_draft, DRAFT_UNIT)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    part = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64)
    to = turn(round, num_places) + place
    since = turn(round + 1, num_places) + place
    links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    of, is_live = open_request(links, edges_ptr, deletions_ptr, positions_ptr, seeds_ptr, NUM_NODES, BLOCK_NODE)
    found_scratch = Found(sums_ptr, keys_ptr)
    WORDS: tl.constexpr = _WORDS + _NODE_WORDS * NUM_NODES
    if IS_FIRST:
        at, path = first_at(of, is_live), first_path(of.tree)
    else:
        at, path = load_walk(walks_ptr + since * WORDS, NUM_NODES, BLOCK_NODE)
        found = merge_found(found_scratch, since, NUM_SLICES, BLOCK_SLICE)
    if at.phase != DONE:
        target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, 0)
        draft_rows = Rows(
            draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, num_target_scans
        )  # fmt: skip
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
        if IS_FIRST:
            latest = no_deletion()
            next_at, next_path = descend(
                rows, of, at, path, latest, SPEC_STEPS=SPEC_STEPS, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE,
                TARGET_IS_PROBS=TARGET_IS_PROBS, DRAFT_IS_PROBS=DRAFT_IS_PROBS,
            )  # fmt: skip
        else:
            next_at, next_path, latest = settle_found(
                rows, of, at, path, found, SPEC_STEPS=SPEC_STEPS, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE,
                TARGET_IS_PROBS=TARGET_IS_PROBS, DRAFT_IS_PROBS=DRAFT_IS_PROBS,
            )  # fmt: skip
            if (part == 0) & (latest.slot >= 0):
                store_deletion(of.deletions_ptr, latest)
        if part == 0:
            store_walk_words(walks_ptr + to * WORDS, next_at, next_path, NUM_NODES, BLOCK_NODE)
        if (next_at.phase == DELETING) | (next_at.phase == DRAWING):
            ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            target, draft, keys = pass_tile(
                rows, of, next_at, latest, ids, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE,
                TARGET_IS_PROBS=TARGET_IS_PROBS, DRAFT_IS_PROBS=DRAFT_IS_PROBS,
            )  # fmt: skip
            store_found(found_scratch, to, part, target, draft, keys, NUM_SLICES)
        else:
            store_nothing(found_scratch, to, part, NUM_SLICES)
    else:
        store_nothing(found_scratch, to, part, NUM_SLICES)
        if part == 0:
            store_walk_words(walks_ptr + to * WORDS, at, path, NUM_NODES, BLOCK_NODE)


def allocate_rounds(batch_size: int, num_nodes: int, num_slices: int, device: torch.device) -> dict:
    """Returns the kernel arguments of the scratch that rounds take."""
    words = AT_WORDS + PATH_WORDS * num_nodes
    return {
        "edges_ptr": torch.empty((batch_size, 3, num_nodes), dtype=torch.int32, device=device),
        "walks_ptr": torch.empty((2, batch_size, words), dtype=torch.int32, device=device),
        **allocate_found(batch_size, num_slices, device),
    }


def launch_rounds(shared: dict, num_rounds: int) -> None:
    """Launches the look-up of all edges, then all rounds."""
    device, batch_size = shared["target_ptr"].device, shared["num_places"]
    names = _verify_tree_traversal_edge_kernel.arg_names
    launch(
        "verify_tree_traversal",
        _verify_tree_traversal_edge_kernel,
        (batch_size, shared["NUM_NODES"]),
        **{name: value for name, value in shared.items() if name in names},
        **tuning.row(EDGE_TUNING, device),
    )
    for round in range(num_rounds):
        launch(
            "verify_tree_traversal",
            _verify_tree_traversal_round_kernel,
            (batch_size, shared["NUM_SLICES"]),
            round=round,
            IS_FIRST=round == 0,
            **shared,
            **tuning.row(SLICE_TUNING, device),
        )
