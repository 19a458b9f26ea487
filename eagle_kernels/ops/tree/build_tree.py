"""Turns the drafts that were kept into a token tree: mask, positions and first-child / next-sibling links.

Computes
    For every node its parent (EAGLE-2, arXiv 2406.16858, section 4; the flat candidate ids of SGLang): node i >= 1
    holds candidate id = top_scores_index[i - 1]; slot id // topk of parent_list names the parent's candidate id, slot
    0 is the root. Ancestor sets follow by pointer doubling, ceil(log2 N) rounds.
Shapes
    verified_id       [B]                 int    the root's token: the last committed one, not yet in the target's KV
    parent_list       [B, P]              int    P = topk * (spec_steps - 1) + 1: slot -> candidate id
    top_scores_index  [B, N - 1]          int    candidate ids of nodes 1..N-1, ascending
    draft_tokens      [B, N - 1]          int    their tokens
    seq_lens          [B]                 int    committed length, the root not counted
    seq_lens_sum      int                        sum of seq_lens, FULL_MASK without `out` only (sizes the mask)
    -> tree_mask      "packed"               int64 [B, N, ceil(N / 64)], bit j of a row: node j is an ancestor or itself
                      "full_mask"            bool [sum over b of N * (seq_len + N)], rows of request b one after another
                      "qlen_only"            bool [B, N, N]
                      "qlen_only_bitpacking" uint8 / uint16 / uint32 [B, N] for N <= 8 / 16 / 32
    -> positions               [B * N]  int64   seq_len + depth
    -> retrieve_index          [B, N]   int64   b * N + i
    -> retrieve_next_token     [B, N]   int64   first child, -1 for none
    -> retrieve_next_sibling   [B, N]   int64   next sibling, -1 for none; siblings ascend
    -> draft_tokens            [B * N]  int64   verified_id, then draft_tokens
Invariants
    Every output is written whole. A node whose parent is missing or does not precede it is linked to nothing; its mask
    row holds the root and itself, its position is seq_len, and nodes below it count their depth from there. Reads stay
    within the row.
Grid
    (B,), one program builds one tree; FULL_MASK's prefix columns: (B, N), one program fills one row.
Launches
    1; 2 for FULL_MASK unless prefix_is_set.
Traffic
    8 B (2 N + P) read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.tree import ancestor_word, depths
from ...primitives.tree_mask import TreeMaskMode, full_mask_start
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch


class Output(NamedTuple):
    """What `build_tree` returns, in SGLang's order."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


MAX_NODES = 256

# A warp for every 16 nodes keeps the N x N comparisons in registers.
TUNING = {"default": {"nodes_per_warp": 16, "min_warps": 4}}
PREFIX_TUNING = {"default": {"BLOCK_COLUMN": 1024, "num_warps": 4}}


@triton.jit(do_not_specialize=["batch_size", "parent_width", "mask_size"])
def _build_tree_kernel(
    # inputs
    verified_id_ptr,
    parent_list_ptr,
    top_scores_index_ptr,
    draft_tokens_ptr,
    seq_lens_ptr,
    # outputs
    tree_mask_ptr,
    positions_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    tree_tokens_ptr,
    # sizes
    batch_size,
    parent_width,
    mask_size,
    TOPK: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MASK_MODE: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_NODE)
    is_node = node < NUM_NODES
    is_draft = is_node & (node > 0)
    draft_offset = request * (NUM_NODES - 1) + node - 1
    node_offset = request * NUM_NODES + node

    # parents: slot -> the parent's candidate id -> the node that holds it
    candidate = tl.load(top_scores_index_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
    slot = candidate // TOPK
    has_slot = is_draft & (candidate >= 0) & (slot < parent_width)
    parent_candidate = tl.load(
        parent_list_ptr + request * parent_width + slot, mask=has_slot & (slot > 0), other=-1
    ).to(tl.int64)
    # [child, node]: node holds the child's parent
    holds = (parent_candidate[:, None] == candidate[None, :]) & (parent_candidate >= 0)[:, None] & is_draft[None, :]
    first_holder = tl.min(tl.where(holds, node[None, :], BLOCK_NODE), axis=1)
    parent = tl.where(has_slot & (slot == 0), 0, first_holder)
    parent = tl.where(is_draft & (parent < node), parent, -1)

    depth = depths(parent, NUM_ROUNDS)

    # links: the first child is the smallest node with this parent, the next sibling the next one up
    is_child = (parent[None, :] == node[:, None]) & is_draft[None, :]
    first_child = tl.min(tl.where(is_child, node[None, :], BLOCK_NODE), axis=1)
    is_later_sibling = (parent[None, :] == parent[:, None]) & (parent >= 0)[:, None] & (node[None, :] > node[:, None])
    next_sibling = tl.min(tl.where(is_later_sibling, node[None, :], BLOCK_NODE), axis=1)

    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    root_token = tl.load(verified_id_ptr + request).to(tl.int64)
    draft_token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=0).to(tl.int64)
    tl.store(positions_ptr + node_offset, seq_len + depth, mask=is_node)
    tl.store(retrieve_index_ptr + node_offset, node_offset, mask=is_node)
    tl.store(retrieve_next_token_ptr + node_offset, tl.where(first_child < NUM_NODES, first_child, -1), mask=is_node)
    tl.store(
        retrieve_next_sibling_ptr + node_offset, tl.where(next_sibling < NUM_NODES, next_sibling, -1), mask=is_node
    )
    tl.store(tree_tokens_ptr + node_offset, tl.where(node == 0, root_token, draft_token), mask=is_node)

    if MASK_MODE == "full_mask":
        mask_row = full_mask_start(seq_lens_ptr, request, batch_size, NUM_NODES, BLOCK_BATCH)
        mask_row += node * (seq_len + NUM_NODES) + seq_len
    elif MASK_MODE == "qlen_only":
        mask_row = node_offset * NUM_NODES
    else:
        mask_row = node_offset * NUM_WORDS

    for word in tl.static_range(NUM_WORDS):
        bit = node - word * 64
        own = tl.where((bit >= 0) & (bit < 64), tl.full([BLOCK_NODE], 1, tl.int64) << (bit & 63), 0)
        ancestors = ancestor_word(own, parent, NUM_ROUNDS)
        if word == 0:
            ancestors |= 1  # everyone sees the root
        if (MASK_MODE == "packed") or (MASK_MODE == "qlen_only_bitpacking"):
            value = ancestors.to(tree_mask_ptr.dtype.element_ty)
            tl.store(tree_mask_ptr + mask_row + word, value, mask=is_node)
        else:
            column = tl.arange(0, 64)
            cell = mask_row[:, None] + word * 64 + column[None, :]
            visible = ((ancestors[:, None] >> column[None, :]) & 1) != 0
            in_bounds = is_node[:, None] & (word * 64 + column < NUM_NODES)[None, :]
            tl.store(tree_mask_ptr + cell, visible, mask=in_bounds & (cell >= 0) & (cell < mask_size))


@triton.jit(do_not_specialize=["batch_size", "mask_size"])
def _build_tree_prefix_kernel(
    seq_lens_ptr,
    tree_mask_ptr,
    batch_size,
    mask_size,
    NUM_NODES: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_COLUMN: tl.constexpr,
):
    """FULL_MASK: every node sees the whole committed prefix."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    row_start = full_mask_start(seq_lens_ptr, request, batch_size, NUM_NODES, BLOCK_BATCH)
    row_start += row * (seq_len + NUM_NODES)
    for start in range(0, tl.minimum(seq_len, mask_size), BLOCK_COLUMN):
        column = start + tl.arange(0, BLOCK_COLUMN)
        cell = row_start + column
        seen = tl.full([BLOCK_COLUMN], 1, tl.int1)
        tl.store(tree_mask_ptr + cell, seen, mask=(column < seq_len) & (cell >= 0) & (cell < mask_size))


def contract(values: dict) -> Output:
    """Checks the arguments of `build_tree` and describes its outputs."""
    args = check.Arguments("build_tree", values)
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    topk = args.integer("topk", 1)
    spec_steps = args.integer("spec_steps", 1)
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    if values["prefix_is_set"] and (mode != TreeMaskMode.FULL_MASK or values.get("out") is None):
        args.fail("prefix_is_set", "come with 'full_mask' and an out buffer that holds the prefix", True)
    num_candidates = topk + (spec_steps - 1) * topk * topk
    if num_nodes - 1 > num_candidates:
        rule = f"be at most 1 + topk + (spec_steps - 1) * topk^2 = {1 + num_candidates}"
        args.fail("num_verify_tokens", rule, num_nodes)
    args.tensor("verified_id", ("B",), check.INTEGER)
    args.tensor("parent_list", ("B", topk * (spec_steps - 1) + 1), check.INTEGER)
    args.tensor("top_scores_index", ("B", num_nodes - 1), check.INTEGER)
    args.tensor("draft_tokens", ("B", num_nodes - 1), check.INTEGER)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.debug("seq_lens", "not be negative", lambda: values["seq_lens"] >= 0)
    args.debug("top_scores_index", "name a candidate", lambda: values["top_scores_index"] < num_candidates)
    batch_size = args.size("B")
    if mode == TreeMaskMode.PACKED:
        mask = args.spec((batch_size, num_nodes, -(-num_nodes // 64)), torch.int64)
    elif mode == TreeMaskMode.QLEN_ONLY:
        mask = args.spec((batch_size, num_nodes, num_nodes), torch.bool)
    elif mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        if num_nodes > 32:
            rule = "be at most 32 for 'qlen_only_bitpacking' ('packed' has no such limit)"
            args.fail("num_verify_tokens", rule, num_nodes)
        word = torch.uint8 if num_nodes <= 8 else torch.uint16 if num_nodes <= 16 else torch.uint32
        mask = args.spec((batch_size, num_nodes), word)
    else:
        mask = args.spec((_full_mask_size(args, batch_size, num_nodes),), torch.bool)
    node = args.spec((batch_size, num_nodes), torch.int64)
    flat = args.spec((batch_size * num_nodes,), torch.int64)
    return Output(mask, flat, node, node, node, flat)


def _full_mask_size(args: check.Arguments, batch_size: int, num_nodes: int) -> int:
    """A given mask may be larger than needed (a buffer for the longest batch); else the host knows the length sum."""
    out = args.values.get("out")
    if out is not None:
        return tuple(out)[0].numel()
    if args.values["seq_lens_sum"] is None:
        args.fail("seq_lens_sum", "be given for 'full_mask' without out: the mask's size depends on it", None)
    seq_lens_sum = args.integer("seq_lens_sum", 0)
    if check.can_read(args.values["seq_lens"]) and seq_lens_sum != int(args.values["seq_lens"].sum()):
        args.fail("seq_lens_sum", f"be {int(args.values['seq_lens'].sum())}, the sum of seq_lens", seq_lens_sum)
    return num_nodes * (seq_lens_sum + batch_size * num_nodes)


def build_tree(
    verified_id: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_sum: int | None = None,
    *,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: str = TreeMaskMode.PACKED,
    prefix_is_set: bool = False,
    out: Output | None = None,
) -> Output:
    """Builds the verification tree of every request; shapes and layouts are in the module's docstring.

    topk, spec_steps: the branching and the number of levels that the candidates were drafted with.
    num_verify_tokens: N, nodes of a tree with its root, 1..256.
    prefix_is_set: FULL_MASK only, the caller's `out` already holds True in the prefix columns; they are not written.
    out: six tensors to write into; a FULL_MASK buffer may be longer than needed.
    """
    contracted = contract(locals())
    out = check.allocate("build_tree", contracted, out)
    device, batch_size = seq_lens.device, seq_lens.shape[0]
    row = tuning.row(TUNING, device)
    block_node = max(16, triton.next_power_of_2(num_verify_tokens))
    block_batch = 128
    launch(
        "build_tree",
        _build_tree_kernel,
        (batch_size,),
        verified_id_ptr=verified_id,
        parent_list_ptr=parent_list,
        top_scores_index_ptr=top_scores_index,
        draft_tokens_ptr=draft_tokens,
        seq_lens_ptr=seq_lens,
        tree_mask_ptr=out.tree_mask,
        positions_ptr=out.positions,
        retrieve_index_ptr=out.retrieve_index,
        retrieve_next_token_ptr=out.retrieve_next_token,
        retrieve_next_sibling_ptr=out.retrieve_next_sibling,
        tree_tokens_ptr=out.draft_tokens,
        batch_size=batch_size,
        parent_width=parent_list.shape[1],
        mask_size=out.tree_mask.numel(),
        TOPK=topk,
        NUM_NODES=num_verify_tokens,
        NUM_WORDS=-(-num_verify_tokens // 64),
        MASK_MODE=str(tree_mask_mode),
        BLOCK_NODE=block_node,
        BLOCK_BATCH=block_batch,
        NUM_ROUNDS=(num_verify_tokens - 1).bit_length(),
        num_warps=max(block_node // row["nodes_per_warp"], row["min_warps"]),
    )
    if tree_mask_mode == TreeMaskMode.FULL_MASK and not prefix_is_set:
        launch(
            "build_tree",
            _build_tree_prefix_kernel,
            (batch_size, num_verify_tokens),
            seq_lens_ptr=seq_lens,
            tree_mask_ptr=out.tree_mask,
            batch_size=batch_size,
            mask_size=out.tree_mask.numel(),
            NUM_NODES=num_verify_tokens,
            BLOCK_BATCH=block_batch,
            **tuning.row(PREFIX_TUNING, device),
        )
    return out
