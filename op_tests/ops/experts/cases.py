"""Arguments of the ops with experts, as their tests and others need them."""

import torch

from op_tests.harness import to_device


def make_routing(num_rows, num_experts, *, dtype=torch.float32, grain=None, has_bias=False, device="cpu", **options):
    """Arguments of route_experts. grain: logits are multiples of 1 / grain, so that many are equal."""
    logits = torch.randn(num_rows, num_experts)
    if grain is not None:
        logits = (logits * grain).round() / grain
    made = {"logits": logits.to(dtype)}
    if has_bias:
        made["bias"] = torch.randn(num_experts) / 4
    return to_device(made, device) | options


def make_experts(
    num_rows, num_experts, num_chosen, hidden, inner, dtype=torch.float16, *, has_bias=False, device="cpu", **options
):  # fmt: skip
    """Arguments of fused_experts, with sums of about one; the experts of a row differ."""
    experts = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :num_chosen].to(torch.int32)
    made = {
        "x": torch.randn(num_rows, hidden).to(dtype), "experts": experts,
        "weights": torch.rand(num_rows, num_chosen),
        "gate_up": (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        "down": (torch.randn(num_experts, hidden, inner) / inner**0.5).to(dtype),
    }  # fmt: skip
    if has_bias:
        made["gate_up_bias"] = torch.randn(num_experts, 2 * inner).to(dtype)
        made["down_bias"] = torch.randn(num_experts, hidden).to(dtype)
    return to_device(made, device) | options
