"""Reference of select_from_head: a matrix product, rounded, and the selection of its logits."""

import torch

from ..linear.linear_decode import linear_decode
from .select_top_k_tokens import Output, select_top_k_tokens


def select_from_head(
    hidden: torch.Tensor, weight: torch.Tensor, scores: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None, draft_to_target: torch.Tensor | None = None,
    *, topk: int, level: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/select_from_head.py."""
    logits = linear_decode(hidden, weight)
    return select_top_k_tokens(logits, scores, ancestors, draft_to_target, topk=topk, level=level)
