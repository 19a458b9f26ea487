"""Reference of plan_attention: the blocks of one request after another."""

import torch


def plan_attention(
    seq_lens: torch.Tensor, *, num_drafts: int = 0, window: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See eagle_kernels/ops/attention/plan_attention.py; `out` is not written."""
    plan = [0]
    for length in seq_lens.clamp(min=0).tolist():
        # of slots that a row may see: with draft keys the first row is one position past the prefix
        first, stop = 0 if window is None else max(length + (num_drafts > 0) - window, 0), length + num_drafts
        plan.append(plan[-1] + max(-(-stop // 32) - first // 32, 1))
    return torch.tensor(plan, dtype=torch.int32, device=seq_lens.device)
