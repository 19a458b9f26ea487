"""Turns tokens and their parents into a token tree: mask, positions and links, for drafters that name parents.

Computes: Ancestor sets by pointer doubling, ceil(log2 N) rounds for N nodes; a node is linked if the root is among its
    own. Linked nodes get a mask, a depth, a first child and a next sibling.
Invariants: Writes stay within a FULL_MASK whose size contradicts seq_lens.
Grid: (B, 1), one program builds one tree; FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches: 1
Traffic: 16 B N read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launcher
from .shared.tree_building import store_links
from .shared.tree_contract import Output, launch_trees, tree_contract
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix


@triton.jit(do_not_specialize=["mask_size"])
def _tree_from_parents_kernel(
    verified_id_ptr, draft_tokens_ptr, parents_ptr, seq_lens_ptr, out,
    mask_size,
    NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, IS_ALIGNED: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask = TreeMask(out.tree_mask, seq_lens_ptr, mask_size)
    if tl.program_id(1) == 0:
        node = tl.arange(0, next_power_of_2(NUM_NODES, 8))
        is_node = node < NUM_NODES
        is_draft = is_node & (node > 0)
        draft_offset = request * (NUM_NODES - 1) + node - 1
        token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        named = tl.load(parents_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        root_token = tl.load(verified_id_ptr + request).to(tl.int64)

        offset = request * NUM_NODES + node
        tl.store(out.retrieve_index + offset, offset, mask=is_node)
        parent = tl.where((named >= 0) & (named < node) & (token >= 0), named, -1).to(tl.int32)
        is_linked = store_links(request, parent, seq_len, mask, out, NUM_NODES, MASK_MODE, KEEP_LOOSE=False)
        tl.store(out.draft_tokens + offset, tl.where(is_linked & is_draft, token, root_token), mask=is_node)
    elif MASK_MODE == "full_mask":
        fill_prefix(mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES, IS_ALIGNED)


def contract(values: dict) -> Output:
    args = check.Arguments("tree_from_parents", values)
    output = tree_contract(args)
    for name in ("draft_tokens", "parents"):
        args.tensor(name, ("B", values["num_verify_tokens"] - 1), check.INTEGER)
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
    """Builds the verification tree of every request from the parents of its drafts: mask, positions and links.

    A node is linked if its parents lead to the root, each to an earlier node, through tokens that are not negative.

    Args:
        verified_id: [B] int. Token of the root, the last committed one.
        draft_tokens: [B, N - 1] int. Tokens of nodes 1..N-1; a negative one is padding.
        parents: [B, N - 1] int. Parent node of each: 0 is the root (draft i is node i + 1), -1 is padding. A draft
            whose parent is no earlier node is left out.
        seq_lens: [B] int. Committed tokens, the root not counted.
        seq_lens_sum: their sum, for a "full_mask" without `out`.
        num_verify_tokens: N, nodes of a tree, 1..256.
        tree_mask_mode: a `TreeMaskMode`.
        prefix_is_set: the prefix of the "full_mask" in `out` already holds True and is not written.
        out: six tensors to write into.

    Returns:
        A named tuple:
        tree_mask: [B, N, ceil(N / 64)] int64 if packed. What each node sees: itself and its ancestors.
        positions: [B * N] int64. seq_len + depth.
        retrieve_index: [B, N] int64. b * N + i.
        retrieve_next_token: [B, N] int64. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int64. Next sibling, -1 for none; siblings ascend.
        draft_tokens: [B * N] int64. verified_id, then draft_tokens.
        A node that is not linked, such as padding, has no links and sees itself alone. It has the root's position and
        token, so that embedding lookups stay in range. Siblings with the same token stay separate nodes.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks seq_lens, seq_lens_sum and the size of a "full_mask".

    Source:
        eagle_kernels' own; the results are those of SGLang's build_tree_kernel_efficient.

    Example:
        >>> tree = eagle_kernels.tree_from_parents(
        ...     torch.tensor([9]), torch.tensor([[11, 12, 21, -1]]), torch.tensor([[0, 0, 1, -1]]), torch.tensor([4]),
        ...     num_verify_tokens=5)
        >>> tree.draft_tokens.tolist()  # the last node is padding
        [9, 11, 12, 21, 9]
    """
    values = locals()
    out = check.allocate("tree_from_parents", contract(values), out)
    launch_trees(
        "tree_from_parents", _tree_from_parents_kernel, values, out, draft_tokens_ptr=draft_tokens, parents_ptr=parents
    )
    return out
