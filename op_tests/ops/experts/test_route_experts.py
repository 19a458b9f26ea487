"""route_experts against transformers' routers and a sort: scores, groups, biases, ties, NaN."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.experts.route_experts import route_experts as reference
from op_tests.harness import assert_close, assert_equal, check_operation
from op_tests.harness.cases import in_float64
from op_tests.ops.experts.cases import make_routing as make

PATH = "experts.route_experts"
V3 = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "group_scoring": "top2", "scale": 2.5, "num_shared": 1}
V2 = {"num_groups": 8, "top_groups": 3, "renormalize": False, "scale": 16.0, "num_shared": 2}
MODES = {"plain": {}, "sigmoid": {"scoring": "sigmoid"}, "V2": V2, "V3": V3 | {"has_bias": True}, "bias": {
    "has_bias": True, "num_shared": 2,
}}  # fmt: skip
# a number of experts is a constant, and so is each of these
MOST_VARIANTS = {"_route_experts_kernel": 2}


def check(values, case=""):
    """Choices are those of the reference, weights within twice its error."""
    actual, baseline = check_operation(PATH, values, case=case, skip=["weights"])
    expected = reference(**in_float64(values) | ({"bias": values["bias"].double()} if "bias" in values else {}))
    assert_close("route_experts", case, "weights", actual.weights, expected.weights, baseline.weights)
    return actual


def ahead_of_time_cases():
    for num_experts, top_k in ((8, 2), (32, 4), (64, 6), (128, 8), (512, 16)):
        yield f"E={num_experts} K={top_k}", make(3, num_experts, dtype=torch.bfloat16, top_k=top_k)
    yield "V3", make(2, 256, has_bias=True, top_k=8, **V3)
    yield "V2", make(2, 160, top_k=6, dtype=torch.float16, **V2)
    yield "ernie", make(3, 64, has_bias=True, top_k=6, num_shared=2, least_sum=1e-12)


def order_case():
    return make(5, 24, has_bias=True, top_k=4)


def size_sweep():
    for num_rows in (1, 2, 3, 16, 17, 64, 257):
        yield make(num_rows, 64, top_k=4)
        yield {"logits": torch.zeros(num_rows, 64 + num_rows)[:, :64], "top_k": 4}


@pytest.mark.parametrize("mode", MODES)
def test_matches_reference(mode, device):
    """Odd numbers of experts and members of groups; dtypes; ties, where logits are coarse."""
    for num_experts, top_k in ((16, 1), (24, 3), (40, 6), (128, 8)):
        for dtype, grain in itertools.product((torch.float32, torch.bfloat16), (None, 2)):
            values = make(4, num_experts, dtype=dtype, grain=grain, top_k=top_k, device=device, **MODES[mode])
            check(values, f"{mode} E = {num_experts} {dtype} grain {grain}")


def test_the_most_of_all(device):
    check(make(3, 512, top_k=16, num_shared=8, device=device))
    check(make(3, 511, top_k=16, has_bias=True, scoring="sigmoid", device=device))
    check(make(2, 1, top_k=1, num_shared=1, device=device))


def test_a_bias_is_for_the_choice_alone(device):
    """What is chosen for its bias weighs what its logit says."""
    logits = torch.tensor([[4.0, 3.0, 0.0, 1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0], device=device)
    for scoring, expected in (("softmax", logits.softmax(1)), ("sigmoid", logits.sigmoid())):
        routed = eagle_kernels.raw.route_experts(logits, bias, top_k=2, scoring=scoring, renormalize=False)
        assert routed.experts.tolist() == [[2, 0]]
        assert_close("route_experts", scoring, "weights", routed.weights, expected[:, [2, 0]])


def test_groups_by_hand(device):
    """One group has the best expert, another one the best pair."""
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.5, 0.3, 0.2, 0.2, 0.2]], device=device)
    options = {"top_k": 3, "scoring": "sigmoid", "num_groups": 3, "top_groups": 1, "renormalize": False}
    for group_scoring, experts in (("max", [0, 1, 2]), ("top2", [3, 4, 5])):
        routed = eagle_kernels.raw.route_experts(scores.logit(), group_scoring=group_scoring, **options)
        assert routed.experts.tolist() == [experts]


def test_shared_experts_weigh_one(device):
    """Whatever the others are scaled by; they take no part in the sum of the others."""
    values = make(3, 24, top_k=2, scale=2.5, num_shared=2, device=device)
    routed, alone = eagle_kernels.raw.route_experts(**values), eagle_kernels.raw.route_experts(
        **values | {"num_shared": 0}
    )  # fmt: skip
    assert routed.experts[:, 2:].tolist() == [[24, 25]] * 3 and (routed.weights[:, 2:] == 1).all()
    assert_equal("route_experts", "shared", "weights", routed.weights[:, :2].contiguous(), alone.weights)
    assert_close("route_experts", "scale", "sum", alone.weights.sum(1), torch.full((3,), 2.5, device=device))


def test_ties_and_nan(device):
    """Of equal ones the lowest; NaN is last, and stays in its row."""
    nan = float("nan")
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [nan, 0.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]], device=device)
    routed = eagle_kernels.raw.route_experts(logits, top_k=3, scoring="sigmoid")
    assert routed.experts.tolist() == [[0, 1, 2], [3, 2, 1], [1, 3, 2]] and routed.weights.isfinite().all()
    routed = eagle_kernels.raw.route_experts(logits, top_k=4)
    assert routed.experts[1].tolist() == [0, 1, 2, 3] and routed.weights[1].isnan().all()
    assert routed.weights[[0, 2]].isfinite().all()


def test_gpt_oss_takes_the_softmax_of_the_chosen(device):
    values = make(5, 32, top_k=4, device=device)
    routed = eagle_kernels.raw.route_experts(**values)
    chosen = values["logits"].double().gather(1, routed.experts.long())
    assert_close("route_experts", "gpt-oss", "weights", routed.weights, chosen.softmax(1))


def test_an_output_of_int64_and_no_rows(device):
    values = make(3, 24, top_k=4, device=device)
    expected = eagle_kernels.raw.route_experts(**values)
    out = type(expected)(expected.experts.long().zero_(), torch.empty_like(expected.weights))
    assert eagle_kernels.raw.route_experts(**values, out=out) is out
    assert torch.equal(out.experts, expected.experts.long())
    assert eagle_kernels.raw.route_experts(values["logits"][:0], top_k=4).experts.shape == (0, 4)


def _routers():
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
    from transformers.models.gpt_oss import modeling_gpt_oss as oss
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    sizes = {"hidden_size": 16, "num_experts_per_tok": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    yield qwen.Qwen3MoeTopKRouter(qwen.Qwen3MoeConfig(num_experts=24, norm_topk_prob=True, **sizes)), {}
    config = qwen.Qwen3MoeConfig(num_experts=24, norm_topk_prob=False, **sizes)
    yield qwen.Qwen3MoeTopKRouter(config), {"renormalize": False}
    yield mixtral.MixtralTopKRouter(mixtral.MixtralConfig(num_local_experts=24, **sizes)), {}
    yield oss.GptOssTopKRouter(oss.GptOssConfig(num_local_experts=24, **sizes)), {}
    config = ernie.Ernie4_5_MoeConfig(hidden_size=16, num_attention_heads=2, moe_k=3, moe_num_experts=24)
    yield ernie.Ernie4_5_MoeTopKRouter(config), {"least_sum": config.moe_norm_min}
    options = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
    config = v3.DeepseekV3Config(n_routed_experts=24, norm_topk_prob=True, **sizes, **groups)
    yield v3.DeepseekV3TopkRouter(config), options | {"scoring": "sigmoid", "group_scoring": "top2"}
    config = v2.DeepseekV2Config(n_routed_experts=24, topk_method="group_limited_greedy", **sizes, **groups)
    yield v2.DeepseekV2TopkRouter(config), options | {"renormalize": False}


def test_routers_of_transformers():
    """Weights and choices of seven routers, in any order."""
    pytest.importorskip("transformers", "5.20")
    for router, options in _routers():
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter)
        name, x = type(router).__name__, torch.randn(6, 16)
        bias = getattr(router, "e_score_correction_bias", None)
        if hasattr(router, "moe_statics"):
            bias = router.moe_statics.e_score_correction_bias.data[0] / 4
            router.moe_statics.e_score_correction_bias.data[0] = bias
        elif bias is not None:
            bias.normal_()
        with torch.no_grad():
            logits, weights, experts = router(x)
        routed = reference(logits, bias, top_k=3, **options)
        order, theirs = routed.experts.argsort(1), experts.argsort(1)
        assert_equal(name, "experts", "experts", routed.experts.gather(1, order).long(), experts.gather(1, theirs))
        assert_close(name, "weights", "weights", routed.weights.gather(1, order), weights.gather(1, theirs))


def wrong_calls():
    values = make(3, 24, top_k=4)
    yield values | {"logits": torch.zeros(2, 513)}, "logits must have E in 1..512, got 513"
    yield values | {"top_k": 17}, r"top_k must lie in 1..16, got 17"
    yield values | {"num_groups": 5}, "num_groups must divide E = 24, got 5"
    yield values | {"num_groups": 12, "top_groups": 1, "top_k": 3}, r"top_k must lie in 1..2, got 3"
    yield values | {"num_groups": 4, "top_groups": 5}, r"top_groups must lie in 1..4, got 5"
    groups = {"num_groups": 24, "top_groups": 8, "group_scoring": "top2"}
    yield values | groups, "group_scoring must be 'max' for 24 groups of one expert, got top2"
    yield values | {"bias": torch.zeros(23)}, "bias must have E = 24"
    yield values | {"scoring": "relu"}, "scoring must be one of 'softmax', 'sigmoid', got 'relu'"
    yield values | {"num_shared": 9}, "num_shared must lie in 0..8, got 9"


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_full_cross(mode, device):
    sizes = (8, 32, 64, 160, 256, 512)[1 if "num_groups" in MODES[mode] else 0 :]  # 8 groups need more than 8 experts
    for num_experts, num_rows in itertools.product(sizes, (1, 7, 64, 257, 4096)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = make(num_rows, num_experts, dtype=dtype, top_k=6, device=device, **MODES[mode])
            case = f"{num_rows} x {num_experts} {dtype}"
            if num_rows < 64:
                check(values, case)
                continue
            # of so many rows, in some two scores differ by less than a device's exp rounds
            actual, expected = eagle_kernels.raw.route_experts(**values), reference(**in_float64(values))
            differs = (actual.experts != expected.experts).any(1)
            assert differs.sum() <= 1 + num_rows // 500, case
            assert_close("route_experts", case, "weights", actual.weights[~differs], expected.weights[~differs])
