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
    any_order, for selections in any order as SGLang allows them: the parent is the first node of its candidate id,
    earlier or later, so links may lead backwards and form cycles. A node sees the nodes that it meets on its way up, at
    most spec_steps with itself, and the root; its position is seq_len + their number. A missing parent ends the way.
    A FULL_MASK whose size contradicts seq_lens holds what fits: cells that they place past its end are left out, and
    cells of a longer one that they do not reach are not written.
Grid
    (B, 1), one program builds one tree; FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches
    1
Traffic
    8 B (2 N + P) read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_building import Candidates, Tree, store_tree
from .shared.tree_contract import MAX_NODES, TUNING, Output, candidates_tree_contract, tree_arguments, tree_grid
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix


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
    mask = TreeMask(tree_mask_ptr, seq_lens_ptr, batch_size, mask_size)
    if tl.program_id(1) == 0:
        node = tl.arange(0, BLOCK_NODE)
        is_draft = (node > 0) & (node < NUM_NODES)
        draft_offset = request * (NUM_NODES - 1) + node - 1
        candidate = tl.load(top_scores_index_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        draft_token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=0).to(tl.int64)
        candidates = Candidates(candidate, draft_token, verified_id_ptr, parent_list_ptr, parent_width)
        tree = Tree(
            positions_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr, tree_tokens_ptr
        )
        store_tree(
            request, candidates, mask, tree, TOPK=TOPK, NUM_NODES=NUM_NODES, NUM_WORDS=NUM_WORDS, MASK_MODE=MASK_MODE,
            BLOCK_NODE=BLOCK_NODE, BLOCK_BATCH=BLOCK_BATCH, NUM_ROUNDS=NUM_ROUNDS, MAX_HOPS=MAX_HOPS,
        )  # fmt: skip
    elif MASK_MODE == "full_mask":
        fill_prefix(
            mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES=NUM_NODES, IS_ALIGNED=IS_ALIGNED,
            BLOCK_BATCH=BLOCK_BATCH, BLOCK_ROW=BLOCK_ROW, BLOCK_FILL=BLOCK_FILL,
        )  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `build_tree` and describes its outputs."""
    args = check.Arguments("build_tree", values)
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    output = candidates_tree_contract(args, num_nodes)
    args.tensor("top_scores_index", ("B", num_nodes - 1), check.INTEGER)
    args.tensor("draft_tokens", ("B", num_nodes - 1), check.INTEGER)
    num_candidates = values["topk"] + (values["spec_steps"] - 1) * values["topk"] ** 2
    args.debug("top_scores_index", "name a candidate", lambda: values["top_scores_index"] < num_candidates)
    return output


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
    any_order: top_scores_index need not ascend, see Invariants; verify_tree_greedy and verify_tree_coins follow the
        links of such trees with the same argument.
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
        TOPK=topk,
        MAX_HOPS=spec_steps if any_order else 0,
        **tree_arguments(out.tree_mask, num_verify_tokens, tree_mask_mode, tuning.row(TUNING, seq_lens.device)),
    )
    return out
