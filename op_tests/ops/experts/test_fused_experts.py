"""fused_experts against float64 and transformers' experts: numbers of rows, odd sizes, activations, the table."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.experts import fused_experts as module
from eagle_kernels.ops.experts.shared import blocks
from eagle_kernels.reference.ops.experts.fused_experts import fused_experts as reference
from op_tests.harness import assert_close, assert_equal, check_close
from op_tests.harness.retune import retune
from op_tests.ops.experts.cases import make_experts as make
from op_tests.ops.experts.cases import make_quantised

PATH = "experts.fused_experts"
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
OSS = {"activation": "swigluoai", "interleaved": True, "has_bias": True}
check = functools.partial(check_close, PATH)

# formats, and the columns that share a scale
FORMATS = (
    *itertools.product(("w4", "w8"), (32, 64, 128, None)), ("fp8", 128), ("fp8", None), ("mxfp4", None),
)  # fmt: skip
# for 64 and 512 pairs to look through, and for sorted ones; tiles of 16 and 32 pairs among them
MOST_VARIANTS = {"_gate_up_kernel": 4, "_down_kernel": 4}


def ahead_of_time_cases():
    # rows and their average number for an expert: each entry, and each way to find pairs
    for num_rows, num_experts in ((1, 16), (12, 4), (40, 4), (600, 16), (3000, 16)):
        for dtype in (torch.bfloat16, torch.float32) if num_rows < 100 else (torch.bfloat16,):
            yield f"T={num_rows} E={num_experts} {dtype}", make(num_rows, num_experts, 2, 256, 256, dtype)
    yield "float16 gpt-oss", make(3, 8, 4, 2880, 64, torch.float16, **OSS)
    yield "odd", make(3, 8, 2, 130, 70, torch.bfloat16)
    for (form, group_size), num_rows in itertools.product(FORMATS, (3, 100)):
        dtype = torch.float16 if group_size == 64 or num_rows == 100 and form == "mxfp4" else torch.bfloat16
        values = make_quantised(form, num_rows, 4, 2, 512, 256, dtype, group_size=group_size)
        yield f"T={num_rows} {form} {group_size}", values
    yield "zeros", make_quantised("w4", 3, 4, 2, 512, 256, group_size=128, has_zeros=True)
    yield "mxfp4 gpt-oss", make_quantised("mxfp4", 3, 1, 1, 2880, 2880, **OSS)


def order_case():
    return make(5, 4, 2, 40, 24, torch.float32)


def size_sweep():
    for num_rows in (1, 2, 3, 16, 17, 64, 257, 3000):
        yield make(num_rows, 64, 2, 64, 64)
        wide = torch.zeros(num_rows, 64 + 8 * num_rows, dtype=torch.float16)
        yield make(num_rows, 64, 2, 64, 64) | {"x": wide[:, :64]}


@pytest.mark.cross
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(dtype, device):
    """Odd sizes: columns below a tile, and no multiple of one; one expert, all experts, the activation of gpt-oss."""
    for index, (num_rows, num_experts, num_chosen, hidden, inner) in enumerate(
        ((5, 6, 2, 40, 24), (1, 1, 1, 1, 1), (3, 8, 8, 130, 70), (2, 3, 1, 16, 200))
    ):
        values = make(num_rows, num_experts, num_chosen, hidden, inner, dtype, device=device, has_bias=index % 2 == 1)
        check(values, f"{num_rows} rows, {num_chosen} of {num_experts} experts, {hidden} x {inner}")
    check(make(4, 5, 3, 48, 20, dtype, device=device, **OSS), "gpt-oss")


@pytest.mark.parametrize("num_rows", [2, 9, 17, 33, 70])
def test_every_number_of_rows(num_rows, device):
    check(make(num_rows, 4, 2, 48, 24, torch.float16, device=device), f"T = {num_rows}")


@pytest.mark.parametrize(("num_rows", "num_chosen"), [(1, 1), (1, 8), (5, 2), (8, 8), (40, 1)])
def test_few_pairs_of_many_experts(num_rows, num_chosen, device):
    """Each pair may begin a block; all rows of one expert fill several ones."""
    values = make(num_rows, 70, num_chosen, 32, 16, torch.float32, device=device)
    expected = check(values, "different")
    alone = values | {name: values[name][-1:] for name in ("x", "experts", "weights")}
    assert torch.equal(eagle_kernels.raw.fused_experts(**alone), expected[-1:])
    values["experts"] = torch.full_like(values["experts"], 69)
    values["experts"][0, 0] = -1
    check(values, "the same")


def test_more_rows_than_programs_look_through(device, monkeypatch):
    """They are sorted first. The result has the same bits."""
    values = make(30, 5, 3, 40, 24, torch.float32, device=device)
    values["experts"][4:9, 1] = -1
    expected = check(values, "looked up")
    monkeypatch.setattr(blocks, "MAX_LOOKUP", 80)
    monkeypatch.setattr(blocks, "_BLOCK_SORTED", 32)
    retune(monkeypatch, module.TUNING)
    assert_equal("fused_experts", "sorted", "output", check(values, "sorted"), expected)


@pytest.mark.parametrize("entry", range(3))
def test_every_entry(entry, device, monkeypatch):
    rows = dict(module.TUNING["sm_90"][entry])
    del rows["most_of_all"], rows["most_pairs"], rows["words"]
    rows |= {name: min(rows[name], 64) for name in ("block_pair", "block_output", "down_block_output")}
    retune(monkeypatch, module.TUNING, **rows)
    for num_rows in (3, 20):
        check(make(num_rows, 3, 2, 150, 70, torch.float16, device=device), f"T = {num_rows} {rows}")


@pytest.mark.parametrize(("form", "group_size"), FORMATS, ids=str)
def test_quantised_weights(form, group_size, device):
    """Odd sizes: H and I below a group and no multiples of one, where the format allows them; zero points, biases."""
    sizes = (
        ((3, 4, 2, 128, 64), (2, 3, 2, 256, 192))
        if form == "fp8" and group_size
        else ((3, 4, 2, 48, 24), (2, 3, 2, 272, 152))
    )
    for index, (size, dtype) in enumerate(zip(sizes, (torch.float16, torch.bfloat16))):
        options = {"group_size": group_size, "has_zeros": form in ("w4", "w8") and index == 1, "device": device}
        check(make_quantised(form, *size, dtype, **options), f"{form} {group_size} {size}")
    if form == "mxfp4":
        check(make_quantised(form, 20, 4, 2, 80, 40, torch.float16, device=device, **OSS), "gpt-oss")


def test_late_scales_and_sorted_pairs(device, monkeypatch):
    """Scales are multiplied with sums of 128 columns, or with weights; several blocks of an expert."""
    monkeypatch.setattr(blocks, "MAX_LOOKUP", 16)
    for late, form in itertools.product((0, 1), ("w4", "fp8")):
        retune(monkeypatch, module.TUNING, late=late)
        check(make_quantised(form, 20, 3, 2, 256, 128, group_size=128, device=device), f"{form} late {late}")


def test_experts_that_are_none(device):
    """They count for nothing, and no other row goes to their neighbours."""
    values = make(4, 3, 2, 24, 16, torch.float32, device=device)
    values["experts"] = torch.tensor([[0, -1], [3, 2], [-1, -1], [1, 2**31 - 1]], dtype=torch.int32, device=device)
    result = check(values, "none")
    assert not result[2].any()
    alone = values | {"experts": values["experts"][:, :1].clone(), "weights": values["weights"][:, :1].clone()}
    assert torch.equal(result[[0, 3]], eagle_kernels.raw.fused_experts(**alone)[[0, 3]])
    far = values | {"experts": values["experts"].long()}
    far["experts"][1, 0] = 2**32  # whose lower half is expert 0
    assert torch.equal(eagle_kernels.raw.fused_experts(**far), result)


def test_rows_go_to_their_own_expert(device):
    """Each expert multiplies by its number: by hand, with several blocks of one expert."""
    numbers = torch.tensor([1.0, 2.0, 3.0], device=device)
    experts = torch.tensor([[0]] * 20 + [[2]] * 3 + [[1]] * 40, device=device)
    x = torch.ones(63, 16, device=device)
    gate_up = torch.zeros(3, 32, 16, device=device)
    gate_up[:, :16] = 100.0 / 16
    gate_up[:, 16:] = torch.eye(16, device=device) * numbers[:, None, None]
    down = torch.eye(16, device=device).expand(3, -1, -1).contiguous()
    weights = torch.ones(63, 1, device=device)
    result = eagle_kernels.raw.fused_experts(x.half(), experts, weights, gate_up.half(), down.half())
    expected = (100.0 * numbers[experts[:, 0]])[:, None].expand(-1, 16)
    assert_equal("fused_experts", "by hand", "output", result.float(), expected.contiguous())


def test_the_clamp_of_gpt_oss(device):
    """Gates are clamped from above alone, up on both sides."""
    x = torch.eye(4, device=device)
    gate_up = torch.tensor([[20.0, -20.0, 3.0, 2.0], [9.0, 1.0, -9.0, 0.5]], device=device)[None]
    down, routed = torch.ones(1, 4, 1, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
    weights = torch.ones(4, 1, device=device)
    options = {"activation": "swigluoai", "alpha": 1.702, "limit": 7.0}
    result = eagle_kernels.raw.fused_experts(x, routed, weights, gate_up, down, **options)[:, 0]
    gate, up = torch.tensor([7.0, -20.0, 3.0, 2.0]), torch.tensor([7.0, 1.0, -7.0, 0.5])
    expected = gate * torch.sigmoid(1.702 * gate.double()) * (up + 1)
    assert_close("fused_experts", "clamp", "output", result, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_knows_no_other(device):
    """NaN stays in its row; alone and at another place a row has the same bits.

    In fp16 the interpreter multiplies by NumPy, which sums up the same at the same place only.
    """
    values = make(6, 4, 2, 200, 70, torch.float32, device=device)
    before = eagle_kernels.raw.fused_experts(**values)
    x = values["x"].clone()
    x[1, 5], x[3] = float("nan"), float("inf")
    after = eagle_kernels.raw.fused_experts(**values | {"x": x})
    assert after[1].isnan().all() and not after[3].isfinite().any()
    assert torch.equal(after[[0, 2, 4, 5]], before[[0, 2, 4, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "group_size"), FORMATS, ids=str)
def test_rows_of_quantised_weights_are_as_they_are_alone(form, group_size, device):
    values = make_quantised(form, 3000, 8, 2, 384, 256, group_size=group_size, device=device)
    together = eagle_kernels.raw.fused_experts(**values)
    for num_rows in (1, 5, 64, 257, 2048):
        few = values | {name: values[name][:num_rows] for name in ("x", "experts", "weights")}
        result = eagle_kernels.raw.fused_experts(**few)
        assert_equal("fused_experts", f"{form} T = {num_rows}", "output", result, together[:num_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_as_they_are_alone(dtype, device):
    """Bit by bit, in tiles of every size, whatever the other rows' experts are."""
    values = make(3000, 8, 2, 300, 170, dtype, device=device)
    together = eagle_kernels.raw.fused_experts(**values)
    for num_rows in (1, 2, 5, 17, 64, 130, 257, 2048):
        few = values | {name: values[name][:num_rows] for name in ("x", "experts", "weights")}
        result = eagle_kernels.raw.fused_experts(**few)
        assert_equal("fused_experts", f"T = {num_rows}", "output", result, together[:num_rows])


def test_one_instruction_for_all_numbers_of_rows():
    """Hopper's has 64 rows of weight and four warps; with fewer, Triton takes another one, and a row's bits follow."""
    for entry in module.TUNING["sm_90"]:
        assert min(2 * entry["block_output"], entry["down_block_output"]) >= 64, entry
        assert min(entry["num_warps"], entry["down_num_warps"]) >= 4, entry


def test_an_expert_given_twice_counts_twice(device):
    values = make(3, 4, 1, 40, 24, torch.float32, device=device)
    twice = values | {name: values[name].expand(-1, 2).contiguous() for name in ("experts", "weights")}
    once = eagle_kernels.raw.fused_experts(**values)
    assert_close("fused_experts", "twice", "output", eagle_kernels.raw.fused_experts(**twice), 2 * once.double())


def test_into_a_strided_output_and_without_rows(device):
    values = make(3, 4, 2, 40, 24, torch.float16, device=device)
    expected = eagle_kernels.raw.fused_experts(**values)
    wide = torch.full((3, 50), float("nan"), dtype=torch.float16, device=device)
    assert eagle_kernels.raw.fused_experts(**values, out=wide[:, :40]) is not None
    assert_equal("fused_experts", "out", "output", wide[:, :40].contiguous(), expected)
    assert wide[:, 40:].isnan().all()
    none = values | {name: values[name][:0] for name in ("x", "experts", "weights")}
    assert eagle_kernels.raw.fused_experts(**none).shape == (0, 40)


def test_blocks_are_enough():
    """However the pairs are dealt out, and no more than that."""
    for num_pairs, num_experts, block in itertools.product((1, 5, 16, 64, 129), (1, 4, 128), (8, 16)):
        most = blocks.num_blocks(num_pairs, num_experts, block)
        for touched in range(1, min(num_pairs, num_experts) + 1):
            counts = [1] * (touched - 1) + [num_pairs - touched + 1]
            assert sum(-(-count // block) for count in counts) <= most
        spread = [1] * min(num_pairs, num_experts)
        spread[-1] += num_pairs - len(spread)
        assert sum(-(-count // block) for count in spread) + block > most or num_pairs < num_experts


def _modules():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
    from transformers.models.gpt_oss import modeling_gpt_oss as oss
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    sizes = {"hidden_size": 16, "hidden_act": "silu"}
    yield qwen.Qwen3MoeExperts(qwen.Qwen3MoeConfig(num_experts=6, moe_intermediate_size=24, **sizes))
    yield mixtral.MixtralExperts(mixtral.MixtralConfig(num_local_experts=6, intermediate_size=24, **sizes))
    yield v3.DeepseekV3Experts(v3.DeepseekV3Config(n_routed_experts=6, moe_intermediate_size=24, **sizes))
    yield ernie.Ernie4_5_MoeExperts(
        ernie.Ernie4_5_MoeConfig(moe_num_experts=6, moe_intermediate_size=24, hidden_size=16)
    )
    yield oss.GptOssExperts(oss.GptOssConfig(num_local_experts=6, intermediate_size=24, hidden_size=16))


def test_experts_of_transformers():
    """In float64, all five classes."""
    pytest.importorskip("transformers", "5.20")
    for experts in _modules():
        name, state = type(experts).__name__, {}
        for key, parameter in experts.double().named_parameters():
            torch.nn.init.normal_(parameter)
            state[key] = parameter.detach()
        x, weights = torch.randn(7, 16, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
        chosen = torch.rand(7, 6).argsort(1)[:, :3]
        options = {}
        if "gate_up_proj_bias" in state:
            state |= {key: state[key].transpose(1, 2).contiguous() for key in ("gate_up_proj", "down_proj")}
            options = {"gate_up_bias": state["gate_up_proj_bias"], "down_bias": state["down_proj_bias"]}
            options |= {"activation": "swigluoai", "interleaved": True}
        with torch.no_grad():
            expected = experts(x, chosen, weights)
        result = reference(x, chosen, weights, state["gate_up_proj"], state["down_proj"], **options)
        assert (result - expected).abs().max() < 1e-9 * expected.abs().max(), name


def wrong_calls():
    values = make(3, 4, 2, 40, 24)
    yield values | {"down": values["down"][:, :, :20].contiguous()}, "down must have I = 24 in axis 2"
    yield values | {"down": values["down"][:3]}, "down must have E = 4 in axis 0"
    yield values | {"down": values["down"].float()}, "down must have dtype float16, got float32"
    odd = values["gate_up"][:, :23].contiguous()
    yield values | {"gate_up": odd}, "gate_up must have an even number of rows for an expert, gate and up, got 23"
    yield values | {"weights": values["weights"].half()}, "weights must have dtype float32, got float16"
    yield values | {"experts": values["experts"][:, :1].contiguous()}, "weights must have K = 1 in axis 1"
    yield values | {"group_size": 32}, "group_size must be None for weights in 16 bit, got 32"
    few = make_quantised("w4", 3, 4, 2, 256, 128, group_size=128)
    yield values | {"weight_format": "w4"}, "gate_up must have dtype int32, got float16"
    yield few | {"weight_format": "16bit"}, "gate_up must have dtype bfloat16, got int32"
    yield few | {"weight_format": "w8"}, r"gate_up must have shape \[E, S, 2, 16, 32\], got \[4, 16, 2, 16, 16\]"
    yield few | {"weight_format": "mxfp4", "group_size": None}, r"gate_up_scales must have shape \[4, E, 256, 2\]"
    yield few | {"weight_format": "fp4"}, "weight_format must be one of '16bit', 'w4', 'w8', 'fp8', 'mxfp4', got 'fp4'"
    yield few | {"group_size": 16}, "group_size must be None, 32, 64 or 128, got 16"
    yield few | {"down_scales": None}, "down_scales must be a tensor, got NoneType"
    mixed = make_quantised("w8", 3, 4, 2, 256, 128, group_size=128)["down"]
    yield few | {"down": mixed}, r"down must have shape \[E, 16, 1, 16, 16\], got \[4, 16, 1, 16, 32\]"
    zeros = make_quantised("w4", 3, 4, 2, 256, 128, group_size=32, has_zeros=True)["down_zeros"]
    floats = make_quantised("mxfp4", 3, 4, 2, 256, 128)
    yield floats | {"down_zeros": zeros}, "down_zeros must be None for mxfp4, got a tensor"
    narrow = make_quantised("fp8", 3, 4, 2, 256, 24)
    yield narrow | {"group_size": 128}, "gate_up must have a multiple of 128 rows for an expert"
    yield few | {"x": few["x"].float()}, "x must have dtype float16 or bfloat16 for quantised weights, got float32"
    yield values | {"activation": "gelu"}, "activation must be one of 'silu', 'swigluoai', got 'gelu'"


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_cross(dtype, device):
    shapes = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880), (64, 8, 2560, 1536))
    for num_experts, num_chosen, hidden, inner in shapes:
        for num_rows in (1, 2, 8, 16, 64, 256, 1024):
            values = make(num_rows, num_experts, num_chosen, hidden, inner, dtype)
            values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            check(values, f"T = {num_rows}, {num_chosen} of {num_experts}, {hidden} x {inner}")
