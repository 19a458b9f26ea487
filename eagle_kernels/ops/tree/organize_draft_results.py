"""Reranks the candidates of all draft levels and keeps the best ones as the nodes of the verification tree.

Computes: A stable selection. The ascending order of flat ids puts parents before children; a child never scores above
    its parent and has a higher id, so the kept set is closed under parents.
Invariants: -0.0 equals 0.0. One program holds a row, which limits the candidates.
Grid: (B,), one program selects for one request.
Launches: 1; none for num_verify_tokens = 1, where the outputs are empty.
Traffic: C * 4 B + (N - 1) * token size read, 16 B * (N - 1) written, per request of C candidates, for N =
    num_verify_tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import is_among_best
from ...runtime import check
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_contract import MAX_CANDIDATES as MAX_CANDIDATES  # which the engine has to know as well
from .shared.tree_contract import candidates_contract, ranking_warps


class Output(NamedTuple):
    """What `organize_draft_results` returns."""

    top_scores_index: torch.Tensor
    draft_tokens: torch.Tensor


@triton.jit(do_not_specialize=["num_candidates", "num_kept", "stride_candidate_scores_request",
                               "stride_candidate_tokens_request"])  # fmt: skip
def _organize_draft_results_kernel(
    candidate_scores_ptr, candidate_tokens_ptr, out, num_candidates, num_kept, stride_candidate_scores_request,
    stride_candidate_tokens_request,
    BLOCK_CANDIDATE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_CANDIDATE)
    is_candidate = candidate < num_candidates
    scores_row_ptr = candidate_scores_ptr + request * stride_candidate_scores_request
    score = tl.load(scores_row_ptr + candidate, mask=is_candidate, other=0.0)
    is_kept = is_among_best(score, is_candidate, num_kept)
    kept_offset = request * num_kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
    token = tl.load(candidate_tokens_ptr + request * stride_candidate_tokens_request + candidate, mask=is_kept, other=0)
    tl.store(out.top_scores_index + kept_offset, candidate, mask=is_kept)
    tl.store(out.draft_tokens + kept_offset, token, mask=is_kept)


def contract(values: dict) -> Output:
    args = check.Arguments("organize_draft_results", values)
    num_nodes = args.integer("num_verify_tokens", 1)
    num_candidates = candidates_contract(args)
    if num_nodes - 1 > num_candidates:
        args.fail("num_verify_tokens", f"be at most 1 + C = {1 + num_candidates}", num_nodes)
    kept = args.spec((args.size("B"), num_nodes - 1), torch.int64)
    return Output(kept, kept)


@launcher
def organize_draft_results(
    candidate_scores: torch.Tensor, candidate_tokens: torch.Tensor, *, num_verify_tokens: int, out: Output | None = None
) -> Output:
    """Keeps the best candidates of every request, over all draft levels.

    Args:
        candidate_scores: [B, C] fp32, C <= 4096. Scores of the candidates, level by level: K for level 0, K^2 for every
            other one. A candidate's flat id is its column. NaN counts as -inf. Rows may be strided.
        candidate_tokens: [B, C] int. Their tokens. Rows may be strided.
        num_verify_tokens: N, nodes of a tree, 1..C + 1.
        out: two tensors to write into.

    Returns:
        A named tuple:
        top_scores_index: [B, N - 1] int64. Flat ids of the N - 1 candidates with the highest scores, ascending. Ties go
            to the lower id.
        draft_tokens: [B, N - 1] int64. Their tokens.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.2 (reranking); SGLang's organize_draft_results. SGLang's
        takes one tensor per level: concatenate them along axis 1, or let `select_top_k_tokens` write into slices of one
        buffer. That op also gives SGLang's third result, parent_list.

    Example:
        >>> best = eagle_kernels.organize_draft_results(
        ...     torch.tensor([[0.6, 0.3, 0.42, 0.12, 0.27, 0.02]]), torch.tensor([[11, 12, 21, 22, 23, 24]]),
        ...     num_verify_tokens=5)
        >>> best.top_scores_index.tolist()  # the candidates of scores 0.6, 0.3, 0.42 and 0.27
        [[0, 1, 2, 4]]
    """
    out = check.allocate("organize_draft_results", contract(locals()), out)
    batch_size, num_candidates = candidate_scores.shape
    if num_verify_tokens == 1:
        return out
    block_candidate = next_power_of_2(num_candidates)
    launch(
        "organize_draft_results", _organize_draft_results_kernel, (batch_size,),
        candidate_scores_ptr=candidate_scores, candidate_tokens_ptr=candidate_tokens, out=out,
        num_candidates=num_candidates, num_kept=num_verify_tokens - 1,
        stride_candidate_scores_request=candidate_scores.stride(0),
        stride_candidate_tokens_request=candidate_tokens.stride(0),
        BLOCK_CANDIDATE=block_candidate, num_warps=ranking_warps(block_candidate, candidate_scores.device),
    )  # fmt: skip
    return out
