"""Reference of select_top_k_tokens: log-probabilities, two stable sorts, and a gather."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    hidden_rows: torch.Tensor
    parent_slots: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_tokens: torch.Tensor
    ancestors: torch.Tensor


def select_top_k_tokens(
    logits: torch.Tensor, scores: torch.Tensor | None = None, ancestors: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    *, topk: int, level: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/select_top_k_tokens.py."""
    num_beams = 1 if level == 0 else topk
    batch_size, device = logits.shape[0] // num_beams, logits.device
    infinity = float("inf")
    logits = torch.nan_to_num(logits.float(), nan=-infinity, posinf=torch.finfo(torch.float32).max, neginf=-infinity)
    log_probs = torch.log_softmax(logits, dim=-1)
    # logits of one row order as its log-probabilities, of which rounding makes more equal
    token_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()
    candidate_scores = log_probs.gather(1, token_ids).view(batch_size, num_beams, topk)
    if level > 0:
        candidate_scores = candidate_scores + scores[:, :, None]
    candidate_scores = candidate_scores.masked_fill(candidate_scores.isnan(), -infinity).flatten(1)
    if draft_to_target is not None:
        token_ids = token_ids + draft_to_target[token_ids]
    candidate_tokens = token_ids.reshape(batch_size, num_beams * topk)

    order = torch.sort(candidate_scores, dim=-1, descending=True, stable=True).indices
    kept = order[:, :topk]
    parents = kept // topk
    visible = torch.zeros(batch_size, topk, -(-(level + 1) * topk // 64), dtype=torch.int64, device=device)
    if level > 0:
        inherited = ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[2]))
        visible[:, :, : ancestors.shape[2]] = inherited
    for beam in range(topk):
        slot = level * topk + beam
        visible[:, beam, slot // 64] |= torch.ones((), dtype=torch.int64, device=device) << (slot % 64)
    return Output(
        scores=candidate_scores.gather(1, kept),
        tokens=candidate_tokens.gather(1, kept),
        parents=parents,
        hidden_rows=torch.arange(batch_size, device=device)[:, None] * num_beams + parents,
        parent_slots=kept + (0 if level == 0 else topk + topk * topk * (level - 1)),
        candidate_scores=candidate_scores,
        candidate_tokens=candidate_tokens,
        ancestors=visible,
    )
