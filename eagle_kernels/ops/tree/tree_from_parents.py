"""Turns tokens and their parents into a token tree: mask, positions and links, for drafters that name parents.

Computes
    Draft j is node j + 1, parents[b, j] the node that it follows: 0 is the root, -1 says that there is no such node.
    A node is linked if a path of parents leads from it to the root, every step to an earlier node, over tokens that
    are not negative. Linked nodes get a mask, a depth, a first child and a next sibling. Ancestor sets follow by
    pointer doubling, ceil(log2 N) rounds. This is what n-gram and suffix drafting need.
Shapes
    verified_id   [B]         int    the root's token: the last committed one, not yet in the target's KV
    draft_tokens  [B, N - 1]  int    tokens of nodes 1..N-1
    parents       [B, N - 1]  int    node of their parents, -1: padding
    seq_lens      [B]         int    committed length, the root not counted
    seq_lens_sum  int                sum of seq_lens, FULL_MASK without `out` only (sizes the mask)
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
    Every output is written whole. A node that is not linked is no node's child or sibling; of the drafts it sees itself
    alone; it has the root's position and the root's token, so that tables of embeddings are read in range.
    Siblings with the same token stay two nodes.
    A FULL_MASK whose size contradicts seq_lens holds what fits: cells that they place past its end are left out, and
    cells of a longer one that they do not reach are not written.
Grid
    (B, 1), one program builds one tree; FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches
    1
Traffic
    16 B N read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_building import Tree, store_links
from .shared.tree_contract import MAX_NODES, TUNING, Output, tree_arguments, tree_contract, tree_grid
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix


@triton.jit(do_not_specialize=["batch_size", "mask_size"])
def _tree_from_parents_kernel(
    # inputs
    verified_id_ptr,
    draft_tokens_ptr,
    parents_ptr,
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
    mask_size,
    NUM_NODES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MASK_MODE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask = TreeMask(tree_mask_ptr, seq_lens_ptr, batch_size, mask_size)
    if tl.program_id(1) == 0:
        node = tl.arange(0, BLOCK_NODE)
        is_node = node < NUM_NODES
        is_draft = is_node & (node > 0)
        draft_offset = request * (NUM_NODES - 1) + node - 1
        token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        named = tl.load(parents_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        root_token = tl.load(verified_id_ptr + request).to(tl.int64)

        offset = request * NUM_NODES + node
        tl.store(retrieve_index_ptr + offset, offset, mask=is_node)
        parent = tl.where((named >= 0) & (named < node) & (token >= 0), named, -1).to(tl.int32)
        tree = Tree(
            positions_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr, tree_tokens_ptr
        )
        is_linked = store_links(
            request, parent, seq_len, mask, tree, KEEP_LOOSE=False, NUM_NODES=NUM_NODES, NUM_WORDS=NUM_WORDS,
            MASK_MODE=MASK_MODE, BLOCK_NODE=BLOCK_NODE, BLOCK_BATCH=BLOCK_BATCH, NUM_ROUNDS=NUM_ROUNDS,
        )  # fmt: skip
        tl.store(tree_tokens_ptr + offset, tl.where(is_linked & is_draft, token, root_token), mask=is_node)
    elif MASK_MODE == "full_mask":
        fill_prefix(
            mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES=NUM_NODES, IS_ALIGNED=IS_ALIGNED,
            BLOCK_BATCH=BLOCK_BATCH, BLOCK_ROW=BLOCK_ROW, BLOCK_FILL=BLOCK_FILL,
        )  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `tree_from_parents` and describes its outputs."""
    args = check.Arguments("tree_from_parents", values)
    num_nodes = args.integer("num_verify_tokens", 1, MAX_NODES)
    output = tree_contract(args, num_nodes)
    args.tensor("draft_tokens", ("B", num_nodes - 1), check.INTEGER)
    args.tensor("parents", ("B", num_nodes - 1), check.INTEGER)
    return output


@launcher
def tree_from_parents(
    verified_id: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_sum: int | None = None,
    *,
    num_verify_tokens: int,
    tree_mask_mode: str = TreeMaskMode.PACKED,
    prefix_is_set: bool = False,
    out: Output | None = None,
) -> Output:
    """Builds the verification tree of every request; shapes and layouts are in the module's docstring.

    num_verify_tokens: N, nodes of a tree with its root, 1..256.
    prefix_is_set: FULL_MASK only, the caller's `out` already holds True in the prefix columns; they are not written.
    out: six tensors to write into; a FULL_MASK buffer may be longer than needed.
    """
    contracted = contract(locals())
    out = check.allocate("tree_from_parents", contracted, out)
    launch(
        "tree_from_parents",
        _tree_from_parents_kernel,
        tree_grid(seq_lens.shape[0], num_verify_tokens, tree_mask_mode, prefix_is_set),
        verified_id_ptr=verified_id,
        draft_tokens_ptr=draft_tokens,
        parents_ptr=parents,
        seq_lens_ptr=seq_lens,
        tree_mask_ptr=out.tree_mask,
        positions_ptr=out.positions,
        retrieve_index_ptr=out.retrieve_index,
        retrieve_next_token_ptr=out.retrieve_next_token,
        retrieve_next_sibling_ptr=out.retrieve_next_sibling,
        tree_tokens_ptr=out.draft_tokens,
        batch_size=seq_lens.shape[0],
        **tree_arguments(out.tree_mask, num_verify_tokens, tree_mask_mode, tuning.row(TUNING, seq_lens.device)),
    )
    return out
