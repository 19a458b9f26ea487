"""Turns the drafts that were kept into a token tree: mask, positions and first-child / next-sibling links.

Computes
    For every node its parent (EAGLE-2, arXiv 2406.16858, section 4; the flat candidate ids of SGLang): node i >= 1
    holds candidate id = top_scores_index[i - 1]; slot id // topk of parent_list names the parent's candidate id, slot
    0 is the root. Ancestor sets follow by pointer doubling, ceil(log2 N) rounds.
Shapes
    verified_id       [B]                 int    the root's token: the last committed one, not yet in the target's KV
    parent_list       [B, P]              int    P = topk * (spec_steps - 1) + 1: slot -> candidate id
    top_scores_index  [B, N - 1]          int    candidate ids of nodes 1..N-1, ascending (but see any_order)
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
    row holds the root and itself, its position is seq_len, and nodes below it count their depth from there. A candidate
    id outside 0 .. 2^31 - 2 counts as missing. Reads stay within the row.
    any_order, for those who select as SGLang may: the parent is the first node of its candidate id wherever that
    stands, so links may lead backwards and form cycles. A node sees what it meets on its way up, spec_steps nodes at
    most, itself among them, and the root; its position is seq_len + so many. A missing parent ends the way.
    A FULL_MASK whose size contradicts seq_lens holds what fits: cells that they place behind its end are left out, and
    what they leave of a longer one is not written.
Grid
    (B, 1), one program builds one tree; FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches
    1
Traffic
    8 B (2 N + P) read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_building import store_tree
from .shared.tree_mask import TreeMaskMode, fill_prefix, mask_spec


class Output(NamedTuple):
    """What `build_tree` returns, in SGLang's order."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


MAX_NODES = 256

# A warp for every 16 nodes keeps the N x N comparisons in registers, more wait for each other; past 64 nodes so many
# warps do not find the registers they need.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/build_tree.txt
TUNING = {"default": {"nodes_per_warp": 16, "nodes_per_warp_past_64": 32}}
BLOCK_BATCH = 128
# Prefixes are filled some rows and words at a time; more programs than these wait for each other's places.
BLOCK_ROW = 4
BLOCK_FILL = 128
FILL_PROGRAMS = 1024


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
    IS_ALIGNED: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    MAX_HOPS: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        node = tl.arange(0, BLOCK_NODE)
        is_draft = (node > 0) & (node < NUM_NODES)
        draft_offset = request * (NUM_NODES - 1) + node - 1
        candidate = tl.load(top_scores_index_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        draft_token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=0).to(tl.int64)
        store_tree(
            request, candidate, draft_token, verified_id_ptr, parent_list_ptr, seq_lens_ptr, tree_mask_ptr,
            positions_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr, tree_tokens_ptr,
            batch_size, parent_width, mask_size, TOPK, NUM_NODES, NUM_WORDS, MASK_MODE, BLOCK_NODE, BLOCK_BATCH,
            NUM_ROUNDS, MAX_HOPS,
        )  # fmt: skip
    elif MASK_MODE == "full_mask":
        fill_prefix(
            seq_lens_ptr, tree_mask_ptr, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, batch_size, mask_size,
            NUM_NODES, IS_ALIGNED, BLOCK_BATCH, BLOCK_ROW, BLOCK_FILL,
        )  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `build_tree` and describes its outputs."""
    args = check.Arguments("build_tree", values)
    output = tree_contract(args)
    num_drafts = values["num_verify_tokens"] - 1
    args.tensor("top_scores_index", ("B", num_drafts), check.INTEGER)
    args.tensor("draft_tokens", ("B", num_drafts), check.INTEGER)
    num_candidates = values["topk"] + (values["spec_steps"] - 1) * values["topk"] ** 2
    args.debug("top_scores_index", "name a candidate", lambda: values["top_scores_index"] < num_candidates)
    return output


def tree_contract(args: check.Arguments) -> Output:
    """What every op that builds trees of candidates asks of the batch and the tree's sizes, and what it returns."""
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    topk = args.integer("topk", 1)
    spec_steps = args.integer("spec_steps", 1)
    output = layout_contract(args)
    num_candidates = topk + (spec_steps - 1) * topk * topk
    if num_nodes - 1 > num_candidates:
        rule = f"be at most 1 + topk + (spec_steps - 1) * topk^2 = {1 + num_candidates}"
        args.fail("num_verify_tokens", rule, num_nodes)
    args.tensor("parent_list", ("B", topk * (spec_steps - 1) + 1), check.INTEGER)
    return output


def layout_contract(args: check.Arguments) -> Output:
    """What every op that builds trees asks of the batch and the mask's layout, and what it returns."""
    values = args.values
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    if values["prefix_is_set"] and (mode != TreeMaskMode.FULL_MASK or values.get("out") is None):
        args.fail("prefix_is_set", "come with 'full_mask' and an out buffer that holds the prefix", True)
    args.tensor("verified_id", ("B",), check.INTEGER)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.debug("seq_lens", "not be negative", lambda: values["seq_lens"] >= 0)
    batch_size = args.size("B")
    mask = mask_spec(args, mode, batch_size, num_nodes, num_nodes, args.buffer(0))
    node = args.spec((batch_size, num_nodes), torch.int64)
    flat = args.spec((batch_size * num_nodes,), torch.int64)
    return Output(mask, flat, node, node, node, flat)


@launcher
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
    any_order: bool = False,
    out: Output | None = None,
) -> Output:
    """Builds the verification tree of every request; shapes and layouts are in the module's docstring.

    topk, spec_steps: the branching and the number of levels that the candidates were drafted with.
    num_verify_tokens: N, nodes of a tree with its root, 1..256.
    prefix_is_set: FULL_MASK only, the caller's `out` already holds True in the prefix columns; they are not written.
    any_order: top_scores_index need not ascend, see Invariants; verify_tree_greedy and verify_tree_coins, told so as
        well, follow the links of such trees.
    out: six tensors to write into; a FULL_MASK buffer may be longer than needed.
    """
    contracted = contract(locals())
    out = check.allocate("build_tree", contracted, out)
    launch(
        "build_tree",
        _build_tree_kernel,
        tree_grid(seq_lens.shape[0], num_verify_tokens, tree_mask_mode, prefix_is_set),
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
        batch_size=seq_lens.shape[0],
        parent_width=parent_list.shape[1],
        MAX_HOPS=spec_steps if any_order else 0,
        **tree_sizes(
            out.tree_mask,
            topk,
            num_verify_tokens,
            tree_mask_mode,
            tuning.row(TUNING, seq_lens.device),
        ),
    )
    return out


def tree_grid(batch_size: int, num_nodes: int, mode: str, prefix_is_set: bool) -> tuple[int, int]:
    """One program for each tree, and in FULL_MASK those that fill prefixes: enough for a GPU, at most one a row."""
    if mode != TreeMaskMode.FULL_MASK or prefix_is_set:
        return batch_size, 1
    return batch_size, 1 + min(num_nodes, max(1, FILL_PROGRAMS // max(batch_size, 1)))


def tree_sizes(tree_mask: torch.Tensor, topk: int, num_nodes: int, mode: str, tuned: dict) -> dict:
    """The arguments of a kernel that stores trees of candidates: sizes, constants, number of warps."""
    return {"TOPK": topk} | layout_sizes(tree_mask, num_nodes, mode, tuned)


def layout_sizes(tree_mask: torch.Tensor, num_nodes: int, mode: str, tuned: dict) -> dict:
    """The arguments of a kernel that stores trees, whatever they are made of."""
    block_node = max(8, triton.next_power_of_2(num_nodes))
    nodes_per_warp = tuned["nodes_per_warp" if block_node <= 64 else "nodes_per_warp_past_64"]
    return {
        "mask_size": tree_mask.numel(),
        "NUM_NODES": num_nodes,
        "NUM_WORDS": -(-num_nodes // 64),
        "MASK_MODE": str(mode),
        "IS_ALIGNED": mode == TreeMaskMode.FULL_MASK and tree_mask.data_ptr() % 16 == 0,
        "BLOCK_NODE": block_node,
        "BLOCK_BATCH": BLOCK_BATCH,
        "BLOCK_ROW": BLOCK_ROW,
        "BLOCK_FILL": BLOCK_FILL,
        "NUM_ROUNDS": (num_nodes - 1).bit_length(),
        "num_warps": max(block_node // nodes_per_warp, 1),
    }
