"""The launches of verify_tree_traversal that read rows in slices: many programs make a pass over one row.

First the probabilities of every node in the rows above it are looked up, all at once (`Edges`). Then come rounds, in
each of which every walk makes one pass (`traversal_steps.py`). All programs of a request first settle what the round
before found, and descend to the next leaf, each by itself; then they pass over their slice. The first one hands the
walk on. After a fixed number of rounds a program finishes what is left alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import largest_key
from ....primitives.rows import Rows, in_units
from ....primitives.tree_walk import all_nodes, find_above, is_own, load_nodes
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .deletions import no_deletion, store_deletion
from .pair import PairRows, load_pair, load_probs
from .prepare_pair import SLICE_TUNING
from .slices import allocate_found, merge_found, store_found, store_nothing, turn
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

_WORDS = tl.constexpr(AT_WORDS)
_NODE_WORDS = tl.constexpr(PATH_WORDS)

# One program settles a request between rounds: what it looks up lies in the registers of one warp.
EDGE_TUNING = {"default": {"num_warps": 1}}


class Scratch(NamedTuple):
    """Pointers to what launches hand on; all but the deletions are None if there are no rounds.
    deletions is a stack: those of the nodes of the current path, in order. A deleted node's own deletions are dropped,
    so those of a node of the path lie side by side, after its parent's. The one that a round has settled is written in
    it and read from there in later rounds only."""

    edges: Any  # int32 [B, 3, N]: the node above each (-1 for none), p and q there
    walks: Any  # int32 [2, B, 8 + 4 N], see store_walk_words
    sums: Any  # see allocate_found
    keys: Any
    deletions: Any  # int32 [B, N, 4], see store_deletion


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_tree_traversal_edge_kernel(
    links, target, draft, target_to_draft_ptr, scratch, vocab_size, draft_vocab_size, stride_target, stride_draft,
    NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the edge of one node."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    tree = load_nodes(links, request, NUM_NODES)
    above, is_parent = find_above(tree, node)
    while (above > 0) & (is_parent == 0):
        above, is_parent = find_above(tree, above)
    parent = tl.where(is_parent, above, -1)
    target_prob = tl.zeros([], tl.float32)
    draft_prob = tl.zeros([], tl.float32)
    if parent >= 0:
        target_rows = Rows(target, stride_target, vocab_size, 0)  # single tokens are read, so no unit matters
        draft_rows = Rows(draft, stride_draft, draft_vocab_size, 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, vocab_size)
        pair = load_pair(rows, request, request * NUM_NODES + parent, parent >= 0, NUM_SLICES)
        token = tl.sum(tl.where(all_nodes(NUM_NODES) == node, tree.tokens, 0))
        target_prob, draft_prob = load_probs(rows, pair, token, token >= 0)
    edges_ptr = scratch.edges + request * (3 * NUM_NODES) + node
    tl.store(edges_ptr, parent)
    tl.store(edges_ptr + NUM_NODES, target_prob.to(tl.int32, bitcast=True))
    tl.store(edges_ptr + 2 * NUM_NODES, draft_prob.to(tl.int32, bitcast=True))


@triton.jit
def open_request(links, scratch, coins, NUM_NODES: tl.constexpr):
    """Returns the Request of this program and whether its row is live."""
    request = tl.program_id(0).to(tl.int64)
    first = request * NUM_NODES
    tree = load_nodes(links, request, NUM_NODES)
    node = all_nodes(NUM_NODES)
    is_live = tl.max(((node == 0) & is_own(tree.retrieved, request, NUM_NODES)).to(tl.int32)) > 0
    if scratch.edges is None:
        edges = Edges(tree.links * 0 - 1, tree.links.to(tl.float32), tree.links.to(tl.float32))
    else:
        is_node = node < NUM_NODES
        edges_ptr = scratch.edges + request * (3 * NUM_NODES) + node
        edges = Edges(
            tl.load(edges_ptr, mask=is_node, other=-1),
            tl.load(edges_ptr + NUM_NODES, mask=is_node, other=0).to(tl.float32, bitcast=True),
            tl.load(edges_ptr + 2 * NUM_NODES, mask=is_node, other=0).to(tl.float32, bitcast=True),
        )
    seed = tl.load(coins.seeds + request)
    return Request(request, first, tree, edges, coins.positions + first, seed, scratch.deletions + first * 4), is_live


@triton.jit(do_not_specialize=["round", "num_places", "num_ids", "vocab_size", "draft_vocab_size", "stride_target",
                               "stride_draft"])  # fmt: skip
def _verify_tree_traversal_round_kernel(
    links, target, draft, target_to_draft_ptr, coins, scratch,
    round, num_places, num_ids, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, IS_FIRST: tl.constexpr, SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Makes one pass of one walk over one slice; the walk is handed on from round to round."""
    await_predecessor(ENABLE_PDL)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    part = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64)
    to = turn(round, num_places) + place
    since = turn(round + 1, num_places) + place
    of, is_live = open_request(links, scratch, coins, NUM_NODES)
    WORDS: tl.constexpr = _WORDS + _NODE_WORDS * NUM_NODES
    if IS_FIRST:
        at, path = first_at(of, is_live), first_path(of.tree)
    else:
        at, path = load_walk(scratch.walks + since * WORDS, NUM_NODES)
        found = merge_found(scratch, since, NUM_SLICES)
    if at.phase != DONE:
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
        if IS_FIRST:
            latest = no_deletion()
            next_at, next_path = descend(rows, of, at, path, latest, SPEC_STEPS, NUM_SLICES)
        else:
            next_at, next_path, latest = settle_found(rows, of, at, path, found, SPEC_STEPS, NUM_SLICES)
            if (part == 0) & (latest.slot >= 0):
                store_deletion(of.deletions_ptr, latest)
        if part == 0:
            store_walk_words(scratch.walks + to * WORDS, next_at, next_path, NUM_NODES)
        if (next_at.phase == DELETING) | (next_at.phase == DRAWING):
            ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            target_left, draft_left, keys = pass_tile(rows, of, next_at, latest, ids, NUM_SLICES)
            store_found(scratch, to, part, tl.sum(target_left), tl.sum(draft_left), largest_key(keys), NUM_SLICES)
        else:
            store_nothing(scratch, to, part, NUM_SLICES)
    else:
        store_nothing(scratch, to, part, NUM_SLICES)
        if part == 0:
            store_walk_words(scratch.walks + to * WORDS, at, path, NUM_NODES)


def allocate_rounds(candidates: torch.Tensor, num_slices: int, num_rounds: int) -> Scratch:
    """Allocates what launches hand on, with or without rounds."""
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    deletions = torch.empty((batch_size, num_nodes, 4), dtype=torch.int32, device=device)
    if num_rounds == 0:
        return Scratch(None, None, None, None, deletions)
    edges = torch.empty((batch_size, 3, num_nodes), dtype=torch.int32, device=device)
    walks = torch.empty((2, batch_size, AT_WORDS + PATH_WORDS * num_nodes), dtype=torch.int32, device=device)
    return Scratch(edges, walks, *allocate_found(batch_size, num_slices, device), deletions)


def launch_rounds(shared: dict, num_rounds: int) -> None:
    """Launches the look-up of all edges, then all rounds."""
    op, device, batch_size = "verify_tree_traversal", shared["links"].candidates.device, shared["num_places"]
    names = _verify_tree_traversal_edge_kernel.arg_names
    edges = {name: value for name, value in shared.items() if name in names} | tuning.row(EDGE_TUNING, device)
    launch(op, _verify_tree_traversal_edge_kernel, (batch_size, shared["NUM_NODES"]), **edges)
    rounds = shared | tuning.row(SLICE_TUNING, device)
    for round in range(num_rounds):
        now = {"round": round, "IS_FIRST": round == 0}
        launch(op, _verify_tree_traversal_round_kernel, (batch_size, shared["NUM_SLICES"]), **rounds, **now)
