"""Turns the drafts that were kept into a token tree: mask, positions and first-child / next-sibling links.

Computes: For every node its parent (EAGLE-2, arXiv 2406.16858, section 4; the flat candidate ids of SGLang): node i >=
    1 holds candidate id = top_scores_index[i - 1]; slot id // topk of parent_list names the parent's candidate id, slot
    0 is the root. Ancestor sets follow by pointer doubling, ceil(log2 N) rounds; any_order walks up step by step.
Invariants: Nodes below one whose parent is missing or does not precede it count their depth from there. Reads stay
    within the row, and writes within a FULL_MASK whose size contradicts seq_lens.
Grid: (B, 1), one program builds one tree; FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches: 1
Traffic: 8 B (2 N + P) read, 8 B N (5 + ceil(N / 64)) written, FULL_MASK 1 byte a cell.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launcher
from .shared.tree_building import Candidates, store_tree
from .shared.tree_contract import Output, candidates_tree_contract, count_candidates, launch_trees
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix


@triton.jit(do_not_specialize=["parent_width", "mask_size"])
def _build_tree_kernel(
    verified_id_ptr, parent_list_ptr, top_scores_index_ptr, draft_tokens_ptr, seq_lens_ptr, out,
    parent_width, mask_size,
    TOPK: tl.constexpr, NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    MAX_HOPS: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask = TreeMask(out.tree_mask, seq_lens_ptr, mask_size)
    if tl.program_id(1) == 0:
        node = tl.arange(0, next_power_of_2(NUM_NODES, 8))
        is_draft = (node > 0) & (node < NUM_NODES)
        draft_offset = request * (NUM_NODES - 1) + node - 1
        candidate = tl.load(top_scores_index_ptr + draft_offset, mask=is_draft, other=-1).to(tl.int64)
        draft_token = tl.load(draft_tokens_ptr + draft_offset, mask=is_draft, other=0).to(tl.int64)
        candidates = Candidates(candidate, draft_token, verified_id_ptr, parent_list_ptr, parent_width)
        store_tree(request, candidates, mask, out, TOPK, NUM_NODES, MASK_MODE, MAX_HOPS)
    elif MASK_MODE == "full_mask":
        fill_prefix(mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES, IS_ALIGNED)


def contract(values: dict) -> Output:
    args = check.Arguments("build_tree", values)
    output = candidates_tree_contract(args)
    for name in ("top_scores_index", "draft_tokens"):
        args.tensor(name, ("B", values["num_verify_tokens"] - 1), check.INTEGER)
    args.debug("top_scores_index", "name a candidate", lambda: values["top_scores_index"] < count_candidates(values))
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
    """Builds the verification tree of every request: mask, positions and links.

    Args:
        verified_id: [B] int. Token of the root, the last committed one.
        parent_list: [B, K * (S - 1) + 1] int. Candidate id of the parent that each slot stands for; slot 0 is the root.
        top_scores_index: [B, N - 1] int. Candidate ids of nodes 1..N-1, ascending. The parent of candidate `id` is in
            slot `id // K`. Ids outside 0..2^31 - 2 count as missing.
        draft_tokens: [B, N - 1] int. Tokens of nodes 1..N-1.
        seq_lens: [B] int. Committed tokens, the root not counted.
        seq_lens_sum: their sum, for a "full_mask" without `out`.
        topk: K, the branching of the draft.
        spec_steps: S, the levels of the draft.
        num_verify_tokens: N, nodes of a tree, 1..256 and at most 1 + K + (S - 1) * K^2.
        tree_mask_mode: a `TreeMaskMode`.
        prefix_is_set: the prefix of the "full_mask" in `out` already holds True and is not written.
        any_order: `top_scores_index` need not ascend, and parents may come later. A node sees the root and its path up,
            at most S nodes including itself, and its position counts them. Links may point backwards and form cycles;
            `verify_tree_greedy` and `verify_tree_coins` follow them with the same argument.
        out: six tensors to write into.

    Returns:
        A named tuple:
        tree_mask: [B, N, ceil(N / 64)] int64 if packed. What each node sees: itself and its ancestors.
        positions: [B * N] int64. seq_len + depth.
        retrieve_index: [B, N] int64. b * N + i.
        retrieve_next_token: [B, N] int64. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int64. Next sibling, -1 for none; siblings ascend.
        draft_tokens: [B * N] int64. verified_id, then draft_tokens.
        A node whose parent is missing, or comes later without `any_order`, is not any node's child. It sees itself and
        the root, and has the root's position, or with `any_order` the next one.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks that the ids of top_scores_index exist, seq_lens, seq_lens_sum and the size of
        a "full_mask".

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, section 4; candidate ids as in SGLang.

    Example:
        >>> tree = eagle_kernels.build_tree(
        ...     torch.tensor([9]), torch.tensor([[-1, 0, 1, 2, 4]]), torch.tensor([[0, 1, 2, 4]]),
        ...     torch.tensor([[11, 12, 21, 23]]), torch.tensor([4]), topk=2, spec_steps=3, num_verify_tokens=5)
        >>> tree.tree_mask.flatten().tolist()  # each node and its ancestors, as bits
        [1, 3, 5, 11, 21]
    """
    values = locals()
    out = check.allocate("build_tree", contract(values), out)
    launch_trees(
        "build_tree", _build_tree_kernel, values, out,
        parent_list_ptr=parent_list, top_scores_index_ptr=top_scores_index, draft_tokens_ptr=draft_tokens,
        parent_width=parent_list.shape[1],
        TOPK=topk, MAX_HOPS=spec_steps if any_order else 0,
    )  # fmt: skip
    return out
