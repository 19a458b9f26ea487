"""Turns ancestor masks into trees: positions and first-child / next-sibling links, for drafters that deliver a mask.

Computes:
    With M[t, j]: node t sees node j, and j < t:
        depth(t) = how many j are seen; parent(t) = the largest of them, -1 if there is none;
        first child of t = the smallest k with M[k, t], which in a sound mask is a child;
        next sibling of t = the smallest k > t with parent(k) = parent(t), -1 if t has no parent.
Invariants: Links point forward or are -1, so walks along them end, whatever the mask.
Grid: (B,), one program reads one mask.
Launches: 1
Traffic: 8 B N ceil(N / 64) read (1 byte a cell where the layout has cells), 32 B N written, for trees of N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_contract import MAX_NODES
from .shared.tree_mask import TreeMaskMode, check_mask, load_keys, row_starts


class Output(NamedTuple):
    """What `tree_from_mask` returns, in SGLang's order."""

    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor


# Nodes of a warp: so few that comparisons stay in registers.
TUNING = {"default": {"nodes_per_warp": 16, "nodes_per_warp_past_128": 8, "min_warps": 4}}


@triton.jit(do_not_specialize=["mask_size"])
def _tree_from_mask_kernel(
    tree_mask_ptr, seq_lens_ptr, out, mask_size,
    NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_NODES, 16)
    node = tl.arange(0, BLOCK_NODE)
    is_node = node < NUM_NODES
    node_offset = request * NUM_NODES + node
    row_start = row_starts(seq_lens_ptr, request, node, NUM_NODES, NUM_NODES, MASK_MODE)

    depth = tl.zeros([BLOCK_NODE], dtype=tl.int32)
    parent = tl.full([BLOCK_NODE], -1, tl.int32)
    for word in range((NUM_NODES + 63) // 64):
        # [node, ancestor]
        ancestor = word * 64 + tl.arange(0, 64)
        seen = load_keys(tree_mask_ptr, row_start, is_node, word, mask_size, NUM_NODES, MASK_MODE)
        seen = seen & (ancestor[None, :] < node[:, None])
        depth += tl.sum(seen.to(tl.int32), axis=1)
        parent = tl.maximum(parent, tl.max(tl.where(seen, ancestor[None, :], -1), axis=1))
        first_child = tl.min(tl.where(seen, node[:, None], NUM_NODES), axis=0)
        first_child = tl.where(first_child < NUM_NODES, first_child, -1)
        children_ptr = out.retrieve_next_token + request * NUM_NODES
        tl.store(children_ptr + ancestor, first_child.to(tl.int64), mask=ancestor < NUM_NODES)

    if BLOCK_NODE <= 128:
        next_sibling = _first_later(parent, node, parent, node, NUM_NODES)
    else:  # all pairs at once would not fit into registers: 64 parents at a time, by way of the output
        next_sibling = tl.full([BLOCK_NODE], NUM_NODES, tl.int32)
        parents_ptr = out.retrieve_next_sibling + request * NUM_NODES
        tl.store(parents_ptr + node, parent.to(tl.int64), mask=is_node)
        tl.debug_barrier()
        for start in range(0, NUM_NODES, 64):
            other = start + tl.arange(0, 64)
            other_parent = tl.load(parents_ptr + other, mask=other < NUM_NODES, other=-1).to(tl.int32)
            found = _first_later(parent, node, other_parent, other, NUM_NODES)
            next_sibling = tl.minimum(next_sibling, found)
        tl.debug_barrier()  # all have been read
    next_sibling = tl.where(next_sibling < NUM_NODES, next_sibling, -1)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    tl.store(out.positions + node_offset, seq_len + depth, mask=is_node)
    tl.store(out.retrieve_index + node_offset, node_offset, mask=is_node)
    tl.store(out.retrieve_next_sibling + node_offset, next_sibling.to(tl.int64), mask=is_node)


@triton.jit
def _first_later(parent, node, other_parent, other, NUM_NODES: tl.constexpr):
    """Returns the smallest of `other` that comes after each node and has its parent; NUM_NODES if there is none."""
    is_later = (other_parent[None, :] == parent[:, None]) & (parent >= 0)[:, None] & (other[None, :] > node[:, None])
    return tl.min(tl.where(is_later, other[None, :], NUM_NODES), axis=1)


def contract(values: dict) -> Output:
    args = check.Arguments("tree_from_mask", values)
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.debug("seq_lens", "not be negative", lambda: values["seq_lens"] >= 0)
    batch_size = args.size("B")
    mask_batch, num_rows, _ = check_mask(args, mode, num_nodes)
    if mask_batch != batch_size or num_rows != num_nodes:
        rule = f"hold {num_nodes} rows for each of {batch_size} requests"
        args.fail("tree_mask", rule, f"shape {list(values['tree_mask'].shape)}")
    node = args.spec((batch_size, num_nodes), torch.int64)
    return Output(args.spec((batch_size * num_nodes,), torch.int64), node, node, node)


@launcher
def tree_from_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_verify_tokens: int,
    tree_mask_mode: str = TreeMaskMode.PACKED,
    out: Output | None = None,
) -> Output:
    """Derives positions and links of every request's tree from its mask, for drafters that provide a mask.

    Args:
        tree_mask: [B, N, ceil(N / 64)] int64 if packed. Which nodes each node sees, in the layout `tree_mask_mode`.
            Only earlier nodes are its ancestors: bits for itself and for later nodes are ignored.
        seq_lens: [B] int. Committed tokens, the root not counted.
        num_verify_tokens: N, nodes of a tree, 1..256.
        tree_mask_mode: a `TreeMaskMode`.
        out: four tensors to write into.

    Returns:
        A named tuple:
        positions: [B * N] int64. seq_len + depth, which is the number of ancestors.
        retrieve_index: [B, N] int64. b * N + i.
        retrieve_next_token: [B, N] int64. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int64. Next sibling, -1 for none; siblings ascend.
        The parent of a node is the last of its ancestors. A node without ancestors has no siblings.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks seq_lens.

    Source:
        SGLang's reconstruct_indices_from_tree_mask, which takes only "qlen_only"; "packed" is eagle_kernels' own.

    Example:
        >>> tree = eagle_kernels.tree_from_mask(
        ...     torch.tensor([[[1], [3], [5], [11], [21]]]), torch.tensor([4]), num_verify_tokens=5)
        >>> tree.retrieve_next_token.tolist(), tree.retrieve_next_sibling.tolist()
        ([[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]])
    """
    out = check.allocate("tree_from_mask", contract(locals()), out)
    row = tuning.row(TUNING, seq_lens.device)
    block_node = next_power_of_2(num_verify_tokens)
    nodes_per_warp = row["nodes_per_warp" if block_node <= 128 else "nodes_per_warp_past_128"]
    launch(
        "tree_from_mask", _tree_from_mask_kernel, (seq_lens.shape[0],),
        tree_mask_ptr=tree_mask, seq_lens_ptr=seq_lens, out=out, mask_size=tree_mask.numel(),
        NUM_NODES=num_verify_tokens, MASK_MODE=str(tree_mask_mode),
        num_warps=max(block_node // nodes_per_warp, row["min_warps"]),
    )  # fmt: skip
    return out
