"""Device functions on token trees: closing ancestor sets upwards, walking first-child / next-sibling links."""

from __future__ import annotations

from ..runtime.language import tl, triton


@triton.jit
def depths(parents, NUM_ROUNDS: tl.constexpr):
    """Hops of every node to the end of its path, by pointer doubling; parents [node], -1 ends a path."""
    depth = (parents >= 0).to(tl.int32)
    hop = parents
    for _ in tl.static_range(NUM_ROUNDS):
        safe_hop = tl.maximum(hop, 0)
        depth = tl.where(hop >= 0, depth + tl.gather(depth, safe_hop, 0), depth)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return depth


@triton.jit
def ancestor_word(ancestors, parents, NUM_ROUNDS: tl.constexpr):
    """One word of every node's ancestor set, closed upwards by pointer doubling; parents -1 end a path."""
    hop = parents
    for _ in tl.static_range(NUM_ROUNDS):
        safe_hop = tl.maximum(hop, 0)
        ancestors = tl.where(hop >= 0, ancestors | tl.gather(ancestors, safe_hop, 0), ancestors)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return ancestors


@triton.jit
def is_own(retrieved, request, NUM_NODES: tl.constexpr):
    """Whether a retrieve_index entry names a node of this request; a root that does not marks a dead row."""
    return (retrieved >= request * NUM_NODES) & (retrieved < (request + 1) * NUM_NODES)


@triton.jit
def advance(
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    request,
    current,
    token,
    accepted,
    accept_index,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One step of a walk: to the child of `current` that carries `token`, if there is one and S are not accepted yet.

    Returns whether it moved, and the new (current, accepted, accept_index [BLOCK_DEPTH]).
    """
    child = _find_child(
        candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr,
        request, current, token, NUM_NODES,
    )  # fmt: skip
    has_moved = (child >= 0) & (accepted < SPEC_STEPS) & (token >= 0)
    accepted += has_moved.to(tl.int32)
    current = tl.where(has_moved, child, current)
    retrieved = tl.load(retrieve_index_ptr + request * NUM_NODES + current).to(tl.int64)
    accept_index = tl.where((tl.arange(0, BLOCK_DEPTH) == accepted) & has_moved, retrieved, accept_index)
    return has_moved, current, accepted, accept_index


@triton.jit
def store_walk(
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    request,
    predicts,
    accept_index,
    accepted,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Writes the three outputs of a verify op, whole."""
    node = tl.arange(0, BLOCK_NODE)
    depth = tl.arange(0, BLOCK_DEPTH)
    tl.store(predicts_ptr + request * NUM_NODES + node, predicts, mask=node < NUM_NODES)
    path_ptr = accept_index_ptr + request * (SPEC_STEPS + 1) + depth
    tl.store(path_ptr, accept_index.to(tl.int32), mask=depth <= SPEC_STEPS)
    tl.store(accept_token_num_ptr + request, accepted)


@triton.jit
def _find_child(
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    request,
    node,
    token,
    NUM_NODES: tl.constexpr,
):
    """The first child of `node` that carries `token` (int32), -1 if none does.

    Nodes are in topological order, so a sound link points forward; one that does not, or points past the tree, or a
    child whose retrieve_index is not of this request, ends the search. That also ends every cycle.
    """
    offset = request * NUM_NODES
    child = _forward(tl.load(retrieve_next_token_ptr + offset + node), node, NUM_NODES)
    match = tl.full([], -1, tl.int32)
    while child >= 0:
        retrieved = tl.load(retrieve_index_ptr + offset + child).to(tl.int64)
        is_sound = is_own(retrieved, request, NUM_NODES)
        is_match = is_sound & (tl.load(candidates_ptr + offset + child).to(tl.int64) == token)
        match = tl.where(is_match, child, match)
        sibling = _forward(tl.load(retrieve_next_sibling_ptr + offset + child), child, NUM_NODES)
        child = tl.where(is_match | (is_sound == 0), -1, sibling)
    return match


@triton.jit
def _forward(link, node, NUM_NODES: tl.constexpr):
    return tl.where((link > node) & (link < NUM_NODES), link, -1).to(tl.int32)
