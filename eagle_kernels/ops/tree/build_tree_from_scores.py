"""Reranks the candidates of all draft levels and turns the best ones into a token tree: both ops in one launch.

Computes: organize_draft_results, then build_tree.
Invariants: Those of both ops. No child is kept without its parent, and none precedes it.
Grid: That of build_tree; the program that builds a tree ranks its candidates first.
Launches: 1
Traffic: B (4 C + 8 (2 N + P)) read, 8 B N (6 + ceil(N / 64)) written, FULL_MASK 1 byte a cell, for C candidates, N
    nodes and P slots of parent_list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import is_among_best
from ...runtime import check
from ...runtime.language import ceil_log2, next_power_of_2, tl, triton
from ...runtime.launch import launcher
from .shared.tree_building import Candidates, store_tree
from .shared.tree_contract import (
    candidates_contract,
    candidates_tree_contract,
    count_candidates,
    launch_trees,
    ranking_warps,
)
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix


class Output(NamedTuple):
    """What `build_tree_from_scores` returns: the tree, and which candidates it is made of."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor
    top_scores_index: torch.Tensor


@triton.jit(do_not_specialize=["parent_width", "mask_size", "num_candidates", "stride_candidate_scores_request",
                               "stride_candidate_tokens_request"])  # fmt: skip
def _build_tree_from_scores_kernel(
    verified_id_ptr, candidate_scores_ptr, candidate_tokens_ptr, parent_list_ptr, seq_lens_ptr, out,
    parent_width, mask_size, num_candidates, stride_candidate_scores_request, stride_candidate_tokens_request,
    TOPK: tl.constexpr, NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    BLOCK_CANDIDATE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask = TreeMask(out.tree_mask, seq_lens_ptr, mask_size)
    if tl.program_id(1) == 0:
        flat = tl.arange(0, BLOCK_CANDIDATE)
        is_candidate = flat < num_candidates
        scores_row_ptr = candidate_scores_ptr + request * stride_candidate_scores_request
        score = tl.load(scores_row_ptr + flat, mask=is_candidate, other=0.0)
        is_kept = is_among_best(score, is_candidate, NUM_NODES - 1)
        num_kept_to_here = tl.cumsum(is_kept.to(tl.int32), 0)

        # node i is the first candidate with i kept ones up to it: a binary search for each node
        BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_NODES, 8)
        node = tl.arange(0, BLOCK_NODE)
        is_draft = (node > 0) & (node < NUM_NODES)
        candidate = tl.zeros([BLOCK_NODE], tl.int32)
        for halving in tl.static_range(ceil_log2(BLOCK_CANDIDATE)):
            probe = candidate + (BLOCK_CANDIDATE >> (halving + 1))
            candidate = tl.where(tl.gather(num_kept_to_here, probe - 1, 0) < node, probe, candidate)
        candidate = tl.where(is_draft, candidate, -1).to(tl.int64)
        tokens_row_ptr = candidate_tokens_ptr + request * stride_candidate_tokens_request
        draft_token = tl.load(tokens_row_ptr + candidate, mask=is_draft, other=0).to(tl.int64)
        tl.store(out.top_scores_index + request * (NUM_NODES - 1) + node - 1, candidate, mask=is_draft)
        candidates = Candidates(candidate, draft_token, verified_id_ptr, parent_list_ptr, parent_width)
        store_tree(request, candidates, mask, out, TOPK, NUM_NODES, MASK_MODE)
    elif MASK_MODE == "full_mask":
        fill_prefix(mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES, IS_ALIGNED)


def contract(values: dict) -> Output:
    args = check.Arguments("build_tree_from_scores", values)
    tree = candidates_tree_contract(args)
    num_candidates = candidates_contract(args)
    wanted = count_candidates(values)
    if num_candidates != wanted:
        rule = f"have topk + (spec_steps - 1) * topk^2 = {wanted} candidates"
        args.fail("candidate_scores", rule, num_candidates)
    return Output(*tree, args.spec((args.size("B"), values["num_verify_tokens"] - 1), torch.int64))


@launcher
def build_tree_from_scores(
    verified_id: torch.Tensor,
    candidate_scores: torch.Tensor,
    candidate_tokens: torch.Tensor,
    parent_list: torch.Tensor,
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
    """Keeps the best candidates of all draft levels and builds the verification tree of every request.

    It does the work of `organize_draft_results` and `build_tree` in one launch.

    Args:
        verified_id: [B] int. Token of the root, the last committed one.
        candidate_scores: [B, C] fp32, C = K + (S - 1) * K^2 <= 4096. Scores of the candidates, by flat id. NaN counts
            as -inf. Rows may be strided.
        candidate_tokens: [B, C] int. Their tokens. Rows may be strided.
        parent_list: [B, K * (S - 1) + 1] int. Candidate id of the parent that each slot stands for; slot 0 is the root.
        seq_lens: [B] int. Committed tokens, the root not counted.
        seq_lens_sum: their sum, for a "full_mask" without `out`.
        topk: K, the branching of the draft.
        spec_steps: S, the levels of the draft.
        num_verify_tokens: N, nodes of a tree, 1..256 and at most C + 1.
        tree_mask_mode, prefix_is_set: as in `build_tree`.
        out: seven tensors to write into.

    Returns:
        A named tuple:
        tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N, ceil(N / 64)] (if
            packed), [B * N] and thrice [B, N] int64. The tree, as in `build_tree`.
        draft_tokens: [B * N] int64. verified_id, then the tokens of the kept candidates.
        top_scores_index: [B, N - 1] int64. Their flat ids, ascending: nodes 1..N-1. Ties go to the lower id.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks seq_lens, seq_lens_sum and the size of a "full_mask".

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, sections 4.2 (reranking) and 4. SGLang does this in two steps,
        organize_draft_results and build_tree_kernel_efficient.

    Example:
        >>> tree = eagle_kernels.build_tree_from_scores(
        ...     torch.tensor([9]), torch.tensor([[0.6, 0.3, 0.42, 0.12, 0.27, 0.02]]),
        ...     torch.tensor([[11, 12, 21, 22, 23, 24]]), torch.tensor([[-1, 0, 1]]), torch.tensor([4]),
        ...     topk=2, spec_steps=2, num_verify_tokens=5)
        >>> tree.draft_tokens.tolist()  # the root, then the candidates of scores 0.6, 0.3, 0.42 and 0.27
        [9, 11, 12, 21, 23]
    """
    values = locals()
    out = check.allocate("build_tree_from_scores", contract(values), out)
    block_candidate = next_power_of_2(candidate_scores.shape[1])
    launch_trees(
        "build_tree_from_scores", _build_tree_from_scores_kernel, values, out,
        ranking_warps(block_candidate, seq_lens.device),
        candidate_scores_ptr=candidate_scores, candidate_tokens_ptr=candidate_tokens, parent_list_ptr=parent_list,
        parent_width=parent_list.shape[1], num_candidates=candidate_scores.shape[1],
        stride_candidate_scores_request=candidate_scores.stride(0),
        stride_candidate_tokens_request=candidate_tokens.stride(0),
        TOPK=topk, BLOCK_CANDIDATE=block_candidate,
    )  # fmt: skip
    return out
