"""Reference of build_tree_from_scores: one op after the other."""

from typing import NamedTuple

import torch

from .build_tree import build_tree
from .organize_draft_results import organize_draft_results


class Output(NamedTuple):
    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor
    top_scores_index: torch.Tensor


def build_tree_from_scores(
    verified_id: torch.Tensor, candidate_scores: torch.Tensor, candidate_tokens: torch.Tensor,
    parent_list: torch.Tensor, seq_lens: torch.Tensor, seq_lens_sum: int | None = None,
    *, topk: int, spec_steps: int, num_verify_tokens: int, tree_mask_mode: str = "packed", prefix_is_set: bool = False,
    out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/build_tree_from_scores.py."""
    best = organize_draft_results(candidate_scores, candidate_tokens, num_verify_tokens=num_verify_tokens)
    tree = build_tree(
        verified_id, parent_list, best.top_scores_index, best.draft_tokens, seq_lens, seq_lens_sum, topk=topk,
        spec_steps=spec_steps, num_verify_tokens=num_verify_tokens, tree_mask_mode=tree_mask_mode,
        prefix_is_set=prefix_is_set, out=out,
    )  # fmt: skip
    return Output(*tree, best.top_scores_index)
