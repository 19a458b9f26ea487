"""Reference of organize_draft_results: a stable sort by score, then a sort by id."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    top_scores_index: torch.Tensor
    draft_tokens: torch.Tensor


def organize_draft_results(
    candidate_scores: torch.Tensor, candidate_tokens: torch.Tensor, *, num_verify_tokens: int
) -> Output:
    """See eagle_kernels/ops/tree/organize_draft_results.py."""
    scores = candidate_scores.masked_fill(candidate_scores.isnan(), float("-inf"))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    kept = order[:, : num_verify_tokens - 1].sort(dim=-1).values
    return Output(kept, candidate_tokens.gather(1, kept).to(torch.int64))
