"""Reference of route_experts: sorts the experts of each row."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    experts: torch.Tensor
    weights: torch.Tensor


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None = None, *, top_k: int, scoring: str = "softmax",
    num_groups: int = 1, top_groups: int = 1, group_scoring: str = "max", renormalize: bool = True,
    least_sum: float = 1e-20, scale: float = 1.0, num_shared: int = 0,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/experts/route_experts.py. Float64 tensors are computed in float64."""
    (num_rows, num_experts), device = logits.shape, logits.device
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(dim=1)
    choice = scores if bias is None else scores + bias
    choice = torch.where(choice.isnan(), float("-inf"), choice)
    if top_groups < num_groups:
        groups = choice.view(num_rows, num_groups, num_experts // num_groups)
        best = groups.sort(dim=2, descending=True).values
        values = best[..., 0] + best[..., 1] if group_scoring == "top2" else best[..., 0]
        lost = values.sort(dim=1, descending=True, stable=True).indices[:, top_groups:]
        choice = groups.scatter(1, lost[..., None].expand(-1, -1, groups.shape[2]), float("-inf")).flatten(1)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=least_sum)
    shared = torch.arange(num_experts, num_experts + num_shared, device=device).expand(num_rows, -1)
    ones = torch.ones((num_rows, num_shared), dtype=weights.dtype, device=device)
    return Output(torch.cat((chosen, shared), dim=1).to(torch.int32), torch.cat((weights * scale, ones), dim=1))
