"""Walking token trees by their first-child / next-sibling links, in registers, and what the verify ops share."""

from typing import Any, NamedTuple

import torch

from ..runtime import check
from ..runtime.language import next_power_of_2, tl, triton
from ..runtime.launch import bundle

MAX_NODES = 1024

# The token of a node whose candidate is no token. No token of the target equals it: those are -1 at the least.
NO_TOKEN = tl.constexpr(-2)
# A walk in any order writes this over the links of a node that it has met.
MET = tl.constexpr(-1)


class Output(NamedTuple):
    """The outputs of a verify op; in a kernel, the pointers to them."""

    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


class Links(NamedTuple):
    """Pointers to the trees that an op was given, int [B, N] each."""

    candidates: Any
    retrieve_index: Any
    retrieve_next_token: Any
    retrieve_next_sibling: Any


class Tree(NamedTuple):
    """One request's tree in registers, [node] each; see `load_nodes`."""

    retrieved: Any  # int64, its retrieve_index
    tokens: Any  # int32, NO_TOKEN for none
    links: Any  # int32: first child * 65536 + next sibling, 0 for none


class Walk(NamedTuple):
    """A finished walk by nodes, [node] each."""

    retrieved: Any  # int64, as in Tree
    predicted: Any  # int32, the token that the op emits at the node if it is on the path
    depth: Any  # int32, the accepted drafts up to the node; -1 off the path


class Path(NamedTuple):
    """A finished walk by levels, [depth] each."""

    nodes: Any  # int32, -1 past the end of the walk
    tokens: Any  # int32, the token that the op emits at the node


def check_tree(args: check.Arguments) -> Output:
    """Checks what every op that verifies trees is given, and describes what it returns."""
    spec_steps = args.integer("spec_steps", 0, MAX_NODES)  # no path is longer; outputs are as wide
    batch_size, num_nodes = check_links(args)
    return Output(
        args.spec((batch_size * num_nodes,), torch.int32),
        args.spec((batch_size, spec_steps + 1), torch.int32),
        args.spec((batch_size,), torch.int32),
    )


def check_links(args: check.Arguments) -> tuple[int, int]:
    """Checks the trees themselves; returns how many there are, and how many nodes each has."""
    for name in Links._fields:
        args.tensor(name, ("B", "N"), check.INTEGER)
    batch_size, num_nodes = args.size("B"), args.size("N")
    if not 1 <= num_nodes <= MAX_NODES:
        args.fail("candidates", f"hold the root and at most {MAX_NODES} nodes", [batch_size, num_nodes])
    args.debug("retrieve_next_sibling", "be -1 at the root", lambda: _live_links(args.values)[:, 1, :1] == -1)
    for at, name in enumerate(("retrieve_next_token", "retrieve_next_sibling")):
        args.debug(
            name, f"be -1 or a node of 1..{num_nodes - 1} that no other link leads to",
            lambda at=at: _are_sound(_live_links(args.values))[:, at],
        )  # fmt: skip
    return batch_size, num_nodes


def _live_links(values: dict) -> torch.Tensor:
    """Returns the links [B, 2, N] to children and to siblings, -1 in dead rows."""
    links = torch.stack([values[name].long() for name in ("retrieve_next_token", "retrieve_next_sibling")], 1)
    root = values["retrieve_index"][:, 0]
    is_dead = root // links.shape[2] != torch.arange(len(root), device=root.device)
    return links.masked_fill(is_dead[:, None, None], -1)


def _are_sound(links: torch.Tensor) -> torch.Tensor:
    all_links = links.flatten(1)[:, None]
    is_only = (links.flatten(1)[:, :, None] == all_links).sum(2).view(links.shape) == 1
    return (links == -1) | ((links >= 1) & (links < links.shape[2]) & is_only)


def tree_arguments(values: dict) -> dict:
    """Returns the kernel arguments that `load_nodes` reads the op's trees by."""
    return {"links": bundle(Links, values), "NUM_NODES": values["candidates"].shape[1]}


def output_arguments(out: NamedTuple) -> dict:
    """Returns the kernel arguments that `store_walk` and `store_path` write the outputs by."""
    return {"out": out, "SPEC_STEPS": out.accept_index.shape[1] - 1}


@triton.jit
def all_nodes(NUM_NODES: tl.constexpr):
    """Returns the numbers [node] of a tree's nodes, rounded up to a power of two."""
    return tl.arange(0, next_power_of_2(NUM_NODES))


@triton.jit
def all_depths(SPEC_STEPS: tl.constexpr):
    """Returns the depths [depth] that a path may have, rounded up to a power of two of them."""
    return tl.arange(0, next_power_of_2(SPEC_STEPS + 1))


@triton.jit
def token_ids(ids):
    """Returns ids of tokens as int32; what is no token becomes -1."""
    wide = ids.to(tl.int64)
    return tl.where((wide >= 0) & (wide < 2147483648), wide, -1).to(tl.int32)


@triton.jit
def is_own(retrieved, request, NUM_NODES: tl.constexpr):
    """Tells whether a retrieve_index entry names a node of this request; if the root's does not, the row is dead."""
    return (retrieved >= request * NUM_NODES) & (retrieved < (request + 1) * NUM_NODES)


@triton.jit
def load_nodes(links, request, NUM_NODES: tl.constexpr, ANY_ORDER: tl.constexpr = False):
    """Loads one request's Tree, given the Links.
    All nodes are read at once, so that a walk waits for memory a single time. `Tree.links` holds the first child in its
    upper half and the next sibling in its lower half; 0, which no sound link names, stands for none. Nodes are in
    topological order, so a sound link points forward within the tree; that also ends every cycle. With ANY_ORDER a link
    may point to any node but the root, and the caller that follows it looks out for cycles. A node whose retrieve_index
    is not of this request ends the list in which it is met: it carries no token and has no sibling."""
    node = all_nodes(NUM_NODES)
    is_node = node < NUM_NODES
    offset = request * NUM_NODES + node
    retrieved = tl.load(links.retrieve_index + offset, mask=is_node, other=-1).to(tl.int64)
    candidate = tl.load(links.candidates + offset, mask=is_node, other=-1).to(tl.int64)
    first_child = tl.load(links.retrieve_next_token + offset, mask=is_node, other=-1).to(tl.int64)
    next_sibling = tl.load(links.retrieve_next_sibling + offset, mask=is_node, other=-1).to(tl.int64)
    is_sound = is_own(retrieved, request, NUM_NODES)
    is_token = (candidate >= 0) & (candidate < 2147483648) & is_sound
    tokens = tl.where(is_token, candidate, NO_TOKEN).to(tl.int32)
    above = tl.zeros_like(node) if ANY_ORDER else node
    first_child = tl.where((first_child > above) & (first_child < NUM_NODES), first_child, 0)
    next_sibling = tl.where((next_sibling > above) & (next_sibling < NUM_NODES) & is_sound, next_sibling, 0)
    return Tree(retrieved, tokens, (first_child * 65536 + next_sibling).to(tl.int32))


@triton.jit
def find_child(tree, node, token):
    """Returns the first child of `node` that carries `token` (int32), 0 if none does."""
    nodes = tl.arange(0, tree.links.shape[0])
    match = tl.zeros([], dtype=tl.int32)
    child = tl.sum(tl.where(nodes == node, tree.links, 0)) >> 16
    while child > 0:
        is_child = nodes == child
        is_match = tl.sum(tl.where(is_child, tree.tokens, 0)) == token
        sibling = tl.sum(tl.where(is_child, tree.links, 0)) & 0xFFFF
        match = tl.where(is_match, child, match)
        child = tl.where(is_match, 0, sibling)
    return match


@triton.jit
def mark_children(tree, node):
    """Tells which nodes [node] are children of `node`."""
    nodes = tl.arange(0, tree.links.shape[0])
    is_child = nodes < 0
    child = tl.sum(tl.where(nodes == node, tree.links, 0)) >> 16
    while child > 0:
        is_here = nodes == child
        is_child = is_child | is_here
        child = tl.sum(tl.where(is_here, tree.links, 0)) & 0xFFFF
    return is_child


@triton.jit
def find_above(tree, node):
    """Returns the node whose links name `node` (-1 if none does), and whether it is its parent.
    If it is not the parent, it is a sibling before `node`. In sound trees one node names each but the root; else the
    first that does counts, and as parent if it does both. It always stands before `node`, so going up ends."""
    nodes = tl.arange(0, tree.links.shape[0])
    NONE: tl.constexpr = 2 * tree.links.shape[0]
    key = tl.where(tree.links >> 16 == node, 2 * nodes, tl.where(tree.links & 0xFFFF == node, 2 * nodes + 1, NONE))
    first = tl.min(key)
    return tl.where(first < NONE, first >> 1, -1), first & 1 == 0


@triton.jit
def load_children(links, request, parent, NUM_NODES: tl.constexpr):
    """Returns the tokens int32 [node] of the children of `parent`, -1 for all other nodes; parent -1 has none.
    This follows the Links in memory, and each read waits for the one before: for a program that has the time."""
    first = request * NUM_NODES
    node = all_nodes(NUM_NODES)
    tokens = tl.full(node.shape, -1, tl.int32)
    above = parent.to(tl.int64)
    child = tl.load(links.retrieve_next_token + first + parent, mask=parent >= 0, other=-1).to(tl.int64)
    while (child > above) & (child < NUM_NODES):
        candidate = tl.load(links.candidates + first + child)
        sibling = tl.load(links.retrieve_next_sibling + first + child).to(tl.int64)
        is_sound = is_own(tl.load(links.retrieve_index + first + child).to(tl.int64), request, NUM_NODES)
        tokens = tl.where((node == child) & is_sound, token_ids(candidate), tokens)
        above = child
        child = tl.where(is_sound, sibling, -1)
    return tokens


@triton.jit
def match_child(children, token):
    """Returns the first of the children, as `load_children` gives them, that carries `token` int32; -1 if none does."""
    LAST: tl.constexpr = children.shape[0]
    node = tl.arange(0, LAST)
    match = tl.min(tl.where((children == token) & (token >= 0), node, LAST))
    return tl.where(match < LAST, match, -1)


@triton.jit
def follow(
    tree, predicted, request, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ANY_ORDER: tl.constexpr = False
):
    """Returns the depth [node] of the nodes on the path that the target's tokens `predicted` [node] take, else -1.
    One loop goes over the siblings of all levels: a child brings along what is needed next if it is the one. In any
    order a node that was met before ends the walk."""
    node = tl.arange(0, tree.links.shape[0])
    links = tree.links
    depth = tl.where((node == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    is_live = (tl.max(depth) == 0) & (SPEC_STEPS > 0)
    token = tl.sum(tl.where(node == 0, predicted, 0))
    child = tl.where(is_live, tl.sum(tl.where(node == 0, links, 0)) >> 16, 0)
    accepted = tl.zeros([], dtype=tl.int32)
    while child > 0:
        is_child = node == child
        is_match = tl.sum(tl.where(is_child, tree.tokens, 0)) == token
        child_token = tl.sum(tl.where(is_child, predicted, 0))
        child_links = tl.sum(tl.where(is_child, links, 0))
        if ANY_ORDER:
            is_match = is_match & (child_links != MET)
            child_links = tl.where(child_links == MET, 0, child_links)
            links = tl.where(is_child, MET, links)
        accepted += is_match.to(tl.int32)
        depth = tl.where(is_child & is_match, accepted, depth)
        token = tl.where(is_match, child_token, token)
        below = tl.where(accepted < SPEC_STEPS, child_links >> 16, 0)
        child = tl.where(is_match, below, child_links & 0xFFFF)
    return depth


@triton.jit
def store_walk(
    out, request, walk, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, KEEPS_UNVISITED: tl.constexpr = False
):
    """Writes the three outputs of a verify op from its Walk."""
    is_visited = walk.depth >= 0
    last = tl.max(walk.depth)
    _store_predicts(out.predicts, request, walk.predicted, is_visited, NUM_NODES, KEEPS_UNVISITED)
    path_ptr = out.accept_index + request * (SPEC_STEPS + 1)
    tl.store(path_ptr + walk.depth, walk.retrieved.to(tl.int32), mask=is_visited)
    column = all_depths(SPEC_STEPS)
    tl.store(path_ptr + column, tl.full(column.shape, -1, tl.int32), mask=(column > last) & (column <= SPEC_STEPS))
    tl.store(out.accept_token_num + request, tl.maximum(last, 0))


@triton.jit
def store_path(
    out, links, request, path, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, KEEPS_UNVISITED: tl.constexpr = False
):
    """Writes the three outputs of a verify op from its Path."""
    node = all_nodes(NUM_NODES)
    depth = tl.arange(0, path.nodes.shape[0])
    is_visited = path.nodes >= 0
    # [depth, node]
    at_node = tl.where(is_visited[:, None] & (path.nodes[:, None] == node[None, :]), path.tokens[:, None], -1)
    tokens = tl.max(at_node, axis=0)  # of a visited row, so never negative
    _store_predicts(out.predicts, request, tokens, tokens >= 0, NUM_NODES, KEEPS_UNVISITED)
    retrieved = tl.load(links.retrieve_index + request * NUM_NODES + path.nodes, mask=is_visited, other=-1)
    tl.store(out.accept_index + request * (SPEC_STEPS + 1) + depth, retrieved.to(tl.int32), mask=depth <= SPEC_STEPS)
    tl.store(out.accept_token_num + request, tl.maximum(tl.sum(is_visited.to(tl.int32)) - 1, 0))


@triton.jit
def _store_predicts(predicts_ptr, request, tokens, is_visited, NUM_NODES: tl.constexpr, KEEPS_UNVISITED: tl.constexpr):
    """Writes the tokens [node] of visited nodes; all others get -1, or keep what they hold."""
    node = tl.arange(0, tokens.shape[0])
    mask = node < NUM_NODES
    if KEEPS_UNVISITED:
        mask = mask & is_visited
    tl.store(predicts_ptr + request * NUM_NODES + node, tl.where(is_visited, tokens, -1), mask=mask)
