"""Describes token trees from their links: how deep, how wide, how many nodes at each depth.

Computes: Sums along the paths that links make. With the accepted drafts of a verify op they give acceptance by depth:
    of the trees with nodes_per_depth[:, d] > 0, the share with accept_token_num >= d.
Invariants: As in the verify ops the root has no sibling. A node that is named more than once belongs to the lowest node
    that names it, to its child link first. So malformed trees end as well.
Grid: (B,), one program describes one tree.
Launches: 1
Traffic: 2 * B * N * index size read, 4 B (5 + S) written, for N nodes and S = spec_steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree import depths, path_sums
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
    retrieve_next_token_ptr, retrieve_next_sibling_ptr, out, num_depths,
    NUM_NODES: tl.constexpr, BLOCK_DEPTH: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_NODES, 16)
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
    path_sum = path_sums(is_child.to(tl.int32) + tl.where(node == 0, _ROOT, 0), before, NUM_NODES)
    is_linked = path_sum >= _ROOT
    depth = tl.where(is_linked, path_sum - _ROOT, -1)
    place = depths(tl.where(is_child, -1, before), NUM_NODES) + 1
    is_leaf = is_linked & (child < 0)

    tl.store(out.depths + request, tl.max(depth))
    tl.store(out.num_linked + request, tl.sum(is_linked.to(tl.int32)))
    tl.store(out.num_leaves + request, tl.sum(is_leaf.to(tl.int32)))
    tl.store(out.max_branching + request, tl.max(tl.where(is_linked & (node > 0), place, 0)))
    for start in range(0, num_depths, BLOCK_DEPTH):
        level = start + tl.arange(0, BLOCK_DEPTH)
        count = tl.sum((depth[:, None] == level[None, :]).to(tl.int32), axis=0)
        tl.store(out.nodes_per_depth + request * num_depths + level, count, mask=level < num_depths)


def contract(values: dict) -> Output:
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

    A node is linked if it is the root, or if a linked node names it as its first child or next sibling; other nodes are
    not counted.

    Args:
        retrieve_next_token: [B, N] int, N in 1..256. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int. Next sibling, -1 for none.
        spec_steps: S, the last depth of `nodes_per_depth`, 0..256.
        out: five tensors to write into.

    Returns:
        A named tuple:
        depths: [B] int32. Depth of the deepest linked node; the root's is 0.
        num_linked: [B] int32. Linked nodes, the root included.
        num_leaves: [B] int32. Linked nodes without a child.
        max_branching: [B] int32. The most children of a linked node, 0 for a lone root.
        nodes_per_depth: [B, S + 1] int32. Linked nodes at each depth up to S.
        A link that does not point forward, or that leaves the tree, counts as none.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own; the links are those of SGLang's trees.

    Example:
        >>> statistics = eagle_kernels.compute_tree_statistics(
        ...     torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]]), spec_steps=3)
        >>> statistics.nodes_per_depth.tolist()  # the root, its children 1 and 2, and theirs, 3 and 4
        [[1, 2, 2, 0]]
    """
    out = check.allocate("compute_tree_statistics", contract(locals()), out)
    batch_size, num_nodes = retrieve_next_token.shape
    row = tuning.row(TUNING, retrieve_next_token.device)
    launch(
        "compute_tree_statistics", _compute_tree_statistics_kernel, (batch_size,),
        retrieve_next_token_ptr=retrieve_next_token, retrieve_next_sibling_ptr=retrieve_next_sibling, out=out,
        num_depths=spec_steps + 1,
        NUM_NODES=num_nodes, BLOCK_DEPTH=row["BLOCK_DEPTH"],
        num_warps=max(next_power_of_2(num_nodes) // row["nodes_per_warp"], row["min_warps"]),
    )  # fmt: skip
    return out
