"""Describes token trees from their links: how deep, how wide, how many nodes at each depth.

Computes
    A node is linked if it is the root or a linked node names it, as its first child or its next sibling. Per request:
    the largest depth, the number of linked nodes and of leaves among them, the most children that a node has, and the
    number of nodes at each depth. With the accepted drafts of a verify op this gives acceptance by depth: of the trees
    with nodes_per_depth[:, d] > 0, the share with accept_token_num >= d.
Invariants
    As in the verify ops a link must point forward, into the tree, and the root has no sibling; other links do not
    exist. A node that is named more than once belongs to the lowest node that names it, to its child link first. So
    malformed trees end as well. A dead row, all links -1, is a lone root.
Grid
    (B,), one program describes one tree.
Launches
    1
Traffic
    2 * B * N * index size read, 4 B (5 + S) written, for N nodes and S = spec_steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree import depths
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_contract import MAX_NODES


class Output(NamedTuple):
    """What `compute_tree_statistics` returns."""

    depths: torch.Tensor
    num_linked: torch.Tensor
    num_leaves: torch.Tensor
    max_branching: torch.Tensor
    nodes_per_depth: torch.Tensor


# A warp for every 16 nodes keeps the N x N comparisons in registers.
TUNING = {"default": {"nodes_per_warp": 16, "min_warps": 4, "BLOCK_DEPTH": 16}}

# Added to a path's sum by the root alone, so that the sum shows whether the path ends there.
_ROOT = tl.constexpr(1 << 16)


@triton.jit(do_not_specialize=["num_depths"])
def _compute_tree_statistics_kernel(
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    depths_ptr,
    num_linked_ptr,
    num_leaves_ptr,
    max_branching_ptr,
    nodes_per_depth_ptr,
    num_depths,
    NUM_NODES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_NODE)
    is_node = node < NUM_NODES
    child = tl.load(retrieve_next_token_ptr + request * NUM_NODES + node, mask=is_node, other=-1)
    sibling = tl.load(retrieve_next_sibling_ptr + request * NUM_NODES + node, mask=is_node & (node > 0), other=-1)
    child = tl.where((child > node) & (child < NUM_NODES), child, -1).to(tl.int32)
    sibling = tl.where((sibling > node) & (sibling < NUM_NODES), sibling, -1).to(tl.int32)

    # [named, naming]: the lowest node that names each one, in the order of its two links
    link = tl.where(sibling[None, :] == node[:, None], 2 * node[None, :] + 1, 2 * BLOCK_NODE)
    link = tl.where(child[None, :] == node[:, None], 2 * node[None, :], link)
    link = tl.min(link, axis=1)
    is_named = link < 2 * BLOCK_NODE
    before = tl.where(is_named, link // 2, -1)
    is_child = is_named & (link % 2 == 0)

    # a path leads through siblings too, and only its child links lead down
    path_sum = is_child.to(tl.int32) + tl.where(node == 0, _ROOT, 0)
    hop = before
    for _ in tl.static_range(NUM_ROUNDS):
        safe_hop = tl.maximum(hop, 0)
        path_sum += tl.where(hop >= 0, tl.gather(path_sum, safe_hop, 0), 0)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    is_linked = path_sum >= _ROOT
    depth = tl.where(is_linked, path_sum - _ROOT, -1)
    place = depths(tl.where(is_child, -1, before), NUM_ROUNDS) + 1
    is_leaf = is_linked & (child < 0)

    tl.store(depths_ptr + request, tl.max(depth))
    tl.store(num_linked_ptr + request, tl.sum(is_linked.to(tl.int32)))
    tl.store(num_leaves_ptr + request, tl.sum(is_leaf.to(tl.int32)))
    tl.store(max_branching_ptr + request, tl.max(tl.where(is_linked & (node > 0), place, 0)))
    for start in range(0, num_depths, BLOCK_DEPTH):
        level = start + tl.arange(0, BLOCK_DEPTH)
        count = tl.sum((depth[:, None] == level[None, :]).to(tl.int32), axis=0)
        tl.store(nodes_per_depth_ptr + request * num_depths + level, count, mask=level < num_depths)


def contract(values: dict) -> Output:
    """Checks the arguments of `compute_tree_statistics` and describes its outputs."""
    args = check.Arguments("compute_tree_statistics", values)
    spec_steps = args.integer("spec_steps", 0, MAX_NODES)
    args.tensor("retrieve_next_token", ("B", "N"), check.INTEGER)
    args.tensor("retrieve_next_sibling", ("B", "N"), check.INTEGER)
    if not 1 <= args.size("N") <= MAX_NODES:
        args.fail("retrieve_next_token", f"have N in 1..{MAX_NODES}", args.size("N"))
    row = args.spec((args.size("B"),), torch.int32)
    return Output(row, row, row, row, args.spec((args.size("B"), spec_steps + 1), torch.int32))


@launcher
def compute_tree_statistics(
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    *,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """Describes the tree of every request from its links: depth, branching, and the number of nodes at each depth.

    Symbols: B requests, N nodes of a tree (1..256), its root (node 0) included, S = spec_steps. Integers may be int32
    or int64. A node is linked if it is the root, or if a linked node names it as its first child or its next sibling;
    other nodes are not counted.

    Args:
        retrieve_next_token: [B, N] int. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int. Next sibling of each node, -1 for none.
        spec_steps: S, the last depth that has a column of `nodes_per_depth`, 0..256.
        out: five tensors to write into.

    Returns:
        A named tuple, every element of which is written:
        depths: [B] int32. Depth of the deepest linked node; the root's is 0.
        num_linked: [B] int32. Linked nodes, the root included.
        num_leaves: [B] int32. Linked nodes without a child.
        max_branching: [B] int32. The most children that a linked node has, 0 for a lone root.
        nodes_per_depth: [B, S + 1] int32. Column d: linked nodes at depth d. Nodes deeper than S are in no column.
        A link that does not point forward, or that leaves the tree, counts as none. A row whose links are all -1 is a
        lone root.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range; the message names it.

    Source:
        eagle_kernels' own; the links are those of SGLang's trees.

    Example:
        >>> statistics = eagle_kernels.compute_tree_statistics(
        ...     torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]]), spec_steps=3)
        >>> statistics.nodes_per_depth.tolist()  # the root, its children 1 and 2, and theirs, 3 and 4
        [[1, 2, 2, 0]]
        >>> statistics.depths.tolist(), statistics.num_leaves.tolist(), statistics.max_branching.tolist()
        ([2], [2], [2])
    """
    contracted = contract(locals())
    out = check.allocate("compute_tree_statistics", contracted, out)
    batch_size, num_nodes = retrieve_next_token.shape
    row = tuning.row(TUNING, retrieve_next_token.device)
    block_node = max(16, next_power_of_2(num_nodes))
    launch(
        "compute_tree_statistics",
        _compute_tree_statistics_kernel,
        (batch_size,),
        retrieve_next_token_ptr=retrieve_next_token,
        retrieve_next_sibling_ptr=retrieve_next_sibling,
        depths_ptr=out.depths,
        num_linked_ptr=out.num_linked,
        num_leaves_ptr=out.num_leaves,
        max_branching_ptr=out.max_branching,
        nodes_per_depth_ptr=out.nodes_per_depth,
        num_depths=spec_steps + 1,
        NUM_NODES=num_nodes,
        BLOCK_NODE=block_node,
        BLOCK_DEPTH=row["BLOCK_DEPTH"],
        NUM_ROUNDS=(num_nodes - 1).bit_length(),
        num_warps=max(block_node // row["nodes_per_warp"], row["min_warps"]),
    )
    return out
