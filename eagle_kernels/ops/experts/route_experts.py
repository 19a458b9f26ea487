"""Chooses the experts of each row by its router's logits.

Computes: scores are the softmax or the sigmoid of the logits. The choice goes by score + bias, within the top_groups
    best groups of experts; a group is as good as its best expert, or as the sum of its best two. The weights are the
    scores of the chosen ones without the bias, over their sum where renormalize says so, times scale.
Invariants: A row depends on its own logits alone. Ties go to the lower group and the lower expert.
Grid: (T,), one program chooses for one row.
Launches: 1
Traffic: element bytes * T * E, 4 * E with a bias, 8 * T * (K + S) for K chosen and S shared experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher

MAX_EXPERTS, MAX_CHOSEN, MAX_SHARED = 512, 16, 8
# one warp: its reductions meet no barrier
TUNING = {"default": {"num_warps": 1}}
_NO_EXPERT = tl.constexpr(1 << 30)


class Output(NamedTuple):
    """What `route_experts` returns."""

    experts: torch.Tensor
    weights: torch.Tensor


@triton.jit
def _best(values, numbers, is_left):
    """Returns the lowest of the numbers that have the largest value, of those that are left."""
    values = tl.where(is_left, values, float("-inf"))
    best = tl.max(values, axis=0)
    return tl.min(tl.where(is_left & (values == best), numbers, _NO_EXPERT), axis=0)


@triton.jit
def _value_of_groups(choice, is_expert, MEMBERS: tl.constexpr, USES_TWO: tl.constexpr):
    """Returns what each group [GROUP] of choice [GROUP, MEMBER] is worth."""
    best = tl.max(choice, axis=1)
    if not USES_TWO:
        return best
    member = tl.arange(0, MEMBERS)[None, :]
    first = tl.min(tl.where(is_expert & (choice == best[:, None]), member, MEMBERS), axis=1)
    return best + tl.max(tl.where(member == first[:, None], float("-inf"), choice), axis=1)


@triton.jit(do_not_specialize=["stride_logits_row"])
def _route_experts_kernel(
    logits_ptr, bias_ptr, out, stride_logits_row, scale, least_sum,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr, IS_SIGMOID: tl.constexpr, USES_TWO: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    # experts as [GROUP, MEMBER], since the members of a group need be no power of two
    NUM_MEMBERS: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    GROUPS: tl.constexpr = next_power_of_2(NUM_GROUPS)
    MEMBERS: tl.constexpr = next_power_of_2(NUM_MEMBERS)
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    number = group[:, None] * NUM_MEMBERS + member[None, :]
    is_expert = (group < NUM_GROUPS)[:, None] & (member < NUM_MEMBERS)[None, :]
    logits_row_ptr = logits_ptr + row * stride_logits_row
    logits = tl.load(logits_row_ptr + number, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits))
        scores = powers / tl.sum(powers)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + number, mask=is_expert, other=0.0)
    # NaN is the last choice
    choice = tl.where(is_expert & (choice == choice), choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        values = _value_of_groups(choice, is_expert, MEMBERS, USES_TWO)
        is_left = group < NUM_GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            is_left &= group != _best(values, group, is_left)
        choice = tl.where(is_left[:, None], float("-inf"), choice)

    choice, number = tl.reshape(choice, [GROUPS * MEMBERS]), tl.reshape(number, [GROUPS * MEMBERS])
    scores, is_left = tl.reshape(scores, [GROUPS * MEMBERS]), tl.reshape(is_expert, [GROUPS * MEMBERS])
    NUM_PLACES: tl.constexpr = NUM_CHOSEN + NUM_SHARED
    place = tl.arange(0, next_power_of_2(NUM_PLACES))
    # shared experts follow the others in the table; their weight is 1
    experts = NUM_EXPERTS + place - NUM_CHOSEN
    weights = tl.zeros([next_power_of_2(NUM_PLACES)], tl.float32)
    for index in tl.static_range(NUM_CHOSEN):
        chosen = _best(choice, number, is_left)
        is_chosen = is_left & (number == chosen)
        score = tl.sum(tl.where(is_chosen, scores, 0.0))
        experts, weights = tl.where(place == index, chosen, experts), tl.where(place == index, score, weights)
        is_left &= number != chosen
    if IS_RENORMALIZED:
        total = tl.sum(weights)
        weights = weights / tl.where(total < least_sum, least_sum, total)
    weights = tl.where(place < NUM_CHOSEN, weights * scale, 1.0)
    place_ptrs = row * NUM_PLACES + place
    tl.store(out.experts + place_ptrs, experts.to(out.experts.dtype.element_ty), mask=place < NUM_PLACES)
    tl.store(out.weights + place_ptrs, weights, mask=place < NUM_PLACES)


def contract(values: dict) -> Output:
    args = check.Arguments("route_experts", values)
    args.tensor("logits", ("T", "E"), check.FLOAT, contiguous=1)
    num_experts = args.size("E")
    if not 1 <= num_experts <= MAX_EXPERTS:
        args.fail("logits", f"have E in 1..{MAX_EXPERTS}", num_experts)
    args.tensor("bias", ("E",), (torch.float32,), optional=True)
    args.choice("scoring", ("softmax", "sigmoid"))
    num_groups = args.integer("num_groups", 1, num_experts)
    if num_experts % num_groups:
        args.fail("num_groups", f"divide E = {num_experts}", num_groups)
    members, top_groups = num_experts // num_groups, args.integer("top_groups", 1, num_groups)
    if args.choice("group_scoring", ("max", "top2")) == "top2" and members < 2 and top_groups < num_groups:
        args.fail("group_scoring", f"be 'max' for {num_groups} groups of one expert", "top2")
    num_places = args.integer("top_k", 1, min(MAX_CHOSEN, top_groups * members))
    num_places += args.integer("num_shared", 0, MAX_SHARED)
    args.number("least_sum", 0.0)
    args.number("scale")
    shape = (args.size("T"), num_places)
    return Output(args.integers(shape, 0), args.spec(shape, torch.float32))


@launcher
def route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    group_scoring: str = "max",
    renormalize: bool = True,
    least_sum: float = 1e-20,
    scale: float = 1.0,
    num_shared: int = 0,
    out: Output | None = None,
) -> Output:
    """Returns the experts of each row and their weights, as routers of mixtures of experts choose them.

    Symbols: T rows; E experts, 1..512; K = top_k; S = num_shared.

    Args:
        logits: [T, E] fp16, bf16 or fp32. Rows may be strided.
        bias: None or [E] fp32, added to the scores for the choice alone.
        top_k: how many experts a row has, in 1..16 and at most those of top_groups groups.
        scoring: "softmax" over all experts, or "sigmoid" of each logit.
        num_groups: how many groups of neighbouring experts there are; it divides E.
        top_groups: how many of the groups a row may choose from, the best ones.
        group_scoring: "max", a group is as good as its best expert (DeepSeek-V2), or "top2", as the sum of its best two
            (DeepSeek-V3).
        renormalize: divides the weights of a row by their sum.
        least_sum: the least number to divide by, at least 0.
        scale: what weights are multiplied by last.
        num_shared: how many shared experts follow, in 0..8: experts E, E + 1, .. of every row, with a weight of 1.
        out: an `Output` to write into. Its `experts` may be int64.

    Returns:
        A named tuple:
        experts: [T, K + S] int32, the best one first, ties in ascending order; then the shared ones. NaN is last.
        weights: [T, K + S] fp32. With softmax NaN makes all scores of its row NaN.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        Qwen3-MoE, Mixtral, ERNIE 4.5 and DeepSeek-V2 and -V3 in transformers; with "softmax" and renormalize also
        gpt-oss, which takes the softmax of the chosen logits.

    Example:
        >>> logits, bias = torch.tensor([[0.0, 2.0, 1.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 1.0])
        >>> routed = eagle_kernels.route_experts(logits, bias, top_k=2, scoring="sigmoid")
        >>> routed.experts.tolist(), [round(weight, 3) for weight in routed.weights[0].tolist()]
        ([[3, 1]], [0.234, 0.766])
    """
    out = check.allocate("route_experts", contract(locals()), out)
    launch(
        "route_experts", _route_experts_kernel, (len(logits),),
        logits_ptr=logits, bias_ptr=bias, out=out, stride_logits_row=logits.stride(0), scale=float(scale),
        least_sum=float(least_sum), NUM_EXPERTS=logits.shape[1], NUM_GROUPS=num_groups, TOP_GROUPS=top_groups,
        NUM_CHOSEN=top_k, NUM_SHARED=num_shared, IS_SIGMOID=scoring == "sigmoid", USES_TWO=group_scoring == "top2",
        IS_RENORMALIZED=bool(renormalize), **tuning.row(TUNING, logits.device),
    )  # fmt: skip
    return out
