"""Arguments of the ops with experts, as their tests and others need them."""

import torch

from eagle_kernels.reference.ops.linear.shared.packing import pack, pair_groups
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
    made = _routed(num_rows, num_experts, num_chosen, hidden, inner, dtype, has_bias) | {
        "gate_up": (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        "down": (torch.randn(num_experts, hidden, inner) / inner**0.5).to(dtype),
    }
    return to_device(made, device) | options


def make_quantised(
    weight_format, num_rows, num_experts, num_chosen, hidden, inner, dtype=torch.bfloat16, *, group_size=None,
    has_zeros=False, has_bias=False, device="cpu", **options,
):  # fmt: skip
    """Arguments of fused_experts with quantised weights, with sums of about one and every code that is a number."""
    made = _routed(num_rows, num_experts, num_chosen, hidden, inner, dtype, has_bias)
    for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        made |= _quantised(name, weight_format, (num_experts, rows, columns), dtype, group_size, has_zeros)
    return to_device(made, device) | options | {"weight_format": weight_format, "group_size": group_size}


def _routed(num_rows, num_experts, num_chosen, hidden, inner, dtype, has_bias):
    """All but the weights."""
    experts = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :num_chosen].to(torch.int32)
    made = {
        "x": torch.randn(num_rows, hidden).to(dtype), "experts": experts, "weights": torch.rand(num_rows, num_chosen),
    }  # fmt: skip
    if has_bias:
        made["gate_up_bias"] = torch.randn(num_experts, 2 * inner).to(dtype)
        made["down_bias"] = torch.randn(num_experts, hidden).to(dtype)
    return made


def _quantised(name, weight_format, shape, dtype, group_size, has_zeros):
    num_experts, rows, columns = shape
    bits, total = 4 if weight_format in ("w4", "mxfp4") else 8, num_experts * rows
    codes, usual = torch.randint(0, 1 << bits, (total, columns), dtype=torch.uint8), 2.0 ** (2 - bits)
    if weight_format == "fp8":
        codes, usual = torch.where(codes % 128 == 127, 0, codes), 2.0**-7
    if weight_format == "mxfp4":
        group_size, usual = 32, 0.5
    usual /= columns**0.5
    made = {name: pack(codes, bits).unflatten(0, (num_experts, rows // 16))}
    groups = 1 if group_size is None else -(-columns // group_size)
    if weight_format == "fp8" and group_size is not None:
        return made | {f"{name}_scales": (0.5 + torch.rand(groups, num_experts, rows // 128)) * usual}
    scales = (0.5 + torch.rand(groups, total)) * usual
    middle = 8 if weight_format == "w4" else 0
    zeros = torch.randint(middle - 3, middle + 4, (groups, total))
    if weight_format == "mxfp4":
        scales = torch.exp2(scales.log2().round())
    if group_size is None:
        scales = scales[0].view(num_experts, rows).to(torch.float32 if weight_format == "fp8" else dtype)
        zeros = zeros[0].view(num_experts, rows).to(torch.uint8 if bits == 4 else torch.int8)
    else:
        kinds = (torch.bfloat16 if weight_format == "mxfp4" else dtype, torch.int16)
        scales, zeros = (
            pair_groups(each.to(kind), group_size, columns).unflatten(1, (num_experts, rows))
            for each, kind in zip((scales, zeros), kinds)
        )
    made[f"{name}_scales"] = scales
    return made | ({f"{name}_zeros": zeros} if has_zeros else {})
