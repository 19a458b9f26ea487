"""rms_norm against float64 and Hugging Face's norms: odd sizes, strided rows, residuals, and in place."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.nn.rms_norm import Output
from eagle_kernels.reference.ops.nn.rms_norm import rms_norm as reference
from op_tests.harness import assert_close, assert_equal, check_close
from op_tests.harness.cases import in_float64
from op_tests.ops.nn.cases import make_norm as make

PATH = "nn.rms_norm"
SIZES = (1, 2, 3, 31, 64, 129, 512, 4096, 5120, 5121, 8192)


def check(values, case=""):
    """The new residual, a single sum, exactly; but the interpreter does not round to bfloat16, it cuts off."""
    is_exact = values["weight"].dtype != torch.bfloat16 or values["x"].is_cuda
    return check_close(PATH, values, case, fields=Output._fields, exact=("residual",) if is_exact else ())


MAY_SPILL = {"H=65536"}  # more than 16 warps hold


def ahead_of_time_cases():
    yield "H=4096 float16", make(2, 4096, torch.float16)
    yield "H=5120 bfloat16 residual", make(2, 5120, torch.bfloat16, has_residual=True)
    yield "H=8192 float32 residual", make(2, 8192, torch.float32, has_residual=True, round_normalized=False)
    yield "H=4096 bfloat16 fused", make(2, 4096, torch.bfloat16, has_residual=True, round_sum=False)
    yield "H=128 heads", make(2, 128, torch.bfloat16, heads=(4,), weight_offset=1.0)
    yield "H=5121", make(2, 5121, torch.bfloat16)
    yield "parts", make(2, 4096, torch.bfloat16, has_residual=True) | {"x": torch.randn(2, 2, 4096), "sums_parts": True}
    yield "H=65536", make(1, 65536, torch.bfloat16, has_residual=True)


def order_case():
    return make(5, 100, torch.float32, heads=(3,), has_residual=True)


def size_sweep():
    for num_tokens in (1, 2, 3, 16, 17, 64, 257, 4096):
        wide = torch.zeros(num_tokens, 64 + 8 * num_tokens, dtype=torch.float16)
        values = make(num_tokens, 64, torch.float16)
        yield values
        yield values | {"x": wide[:, :64]}
        yield values | {"x": torch.zeros(num_tokens, 64 + num_tokens, dtype=torch.float16)[:, :64]}


@pytest.mark.parametrize("hidden_size", SIZES)
def test_matches_reference(hidden_size, device):
    """Every size with both dtypes; with a residual, an offset and each rounding at least once."""
    index = SIZES.index(hidden_size)
    for dtype, flip in ((torch.float32, 0), (torch.float16, 1)):
        options = {"weight_offset": float(index % 3 == 2), "round_normalized": bool((index // 2 + flip) % 2)}
        options["round_sum"] = index % 4 < 2
        values = make(3, hidden_size, dtype, has_residual=(index + flip) % 2 == 0, device=device, **options)
        check(values, f"H = {hidden_size} {dtype} {options}")


def test_bfloat16(device):
    for has_residual in (False, True):
        check(make(3, 200, torch.bfloat16, has_residual=has_residual, device=device), "bfloat16")


def test_the_longest_row(device):
    check(make(1, 65536, torch.float32, device=device), "H = 65536")


def test_norms_of_heads(device):
    """Queries of a fused projection: [T, heads, H] with strides of its own on both axes, and not all of the heads."""
    fused = torch.randn(4, 9, 80, device=device).half()
    weight = torch.randn(80, device=device).half()
    result = check({"x": fused[:, 2:7], "weight": weight}, "heads")
    flat = eagle_kernels.raw.rms_norm(fused[:, 2:7].reshape(-1, 80), weight)
    assert_equal("rms_norm", "heads", "output", result.output.view(-1, 80), flat.output)


@pytest.mark.parametrize("has_residual", [False, True])
def test_in_place(has_residual, device):
    """`out` may be the inputs, or the inputs the other way round; also where their rows are strided."""
    values = make(4, 300, torch.float32, has_residual=has_residual, device=device)
    expected = eagle_kernels.raw.rms_norm(**values)
    for swapped in (False, True) if has_residual else (False,):
        wide = [torch.full((4, 320), float("nan"), device=device) for _ in range(2)]
        x, residual = (tensor[:, :300] for tensor in wide)
        x.copy_(values["x"])
        out = Output(x, residual[:0])
        if has_residual:
            residual.copy_(values["residual"])
            out = Output(residual, x) if swapped else Output(x, residual)
        given = values | {"x": x} | ({"residual": residual} if has_residual else {})
        result = eagle_kernels.raw.rms_norm(**given, out=out)
        assert result.output is out.output
        assert_equal("rms_norm", "in place", "output", out.output, expected.output)
        assert_equal("rms_norm", "in place", "residual", out.residual, expected.residual)
        assert all(tensor[:, 300:].isnan().all() for tensor in wide)


@pytest.mark.parametrize("num_parts", [1, 2, 8])
@pytest.mark.parametrize("has_residual", [True, False])
def test_parts_are_added_and_rounded(num_parts, has_residual, device):
    """As the norm of their sum in the weight's dtype; also where parts and rows are strided."""
    values = make(3, 200, torch.float16, has_residual=has_residual, device=device)
    parts = torch.randn(num_parts, 3, 203, device=device)[..., :200]
    total = sum(parts[1:], parts[0]).half()
    expected = eagle_kernels.raw.rms_norm(**values | {"x": total})
    result = check(values | {"x": parts, "sums_parts": True}, f"{num_parts} parts")
    for name, got, want in zip(Output._fields, result, expected):
        assert got.dtype == torch.float16
        assert_equal("rms_norm", f"{num_parts} parts", name, got, want)


def test_without_tokens(device):
    for has_residual in (False, True):
        result = eagle_kernels.raw.rms_norm(**make(0, 64, torch.float16, has_residual=has_residual, device=device))
        assert result.output.shape == result.residual.shape == (0, 64)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_knows_no_other(device):
    """A NaN, an infinity and zeros stay in their rows; the others keep their bits in any company."""
    values = make(6, 130, torch.float32, has_residual=True, device=device)
    before = eagle_kernels.raw.rms_norm(**values)
    values["x"][1, 5], values["x"][2, 7], values["residual"][3, 9] = float("nan"), float("inf"), float("-inf")
    values["x"][4], values["residual"][4] = 0.0, 0.0
    after = eagle_kernels.raw.rms_norm(**values)
    assert after.output[1].isnan().all() and not after.output[4].any()
    assert after.output[2].isnan().sum() == 1 and after.output[3].isnan().sum() == 1
    for row in (0, 5):
        assert torch.equal(after.output[row], before.output[row])
        alone = {name: values[name][row : row + 1] for name in ("x", "residual")}
        assert torch.equal(eagle_kernels.raw.rms_norm(**values | alone).output[0], before.output[row])


# sums of squares of small whole numbers are exact in any order, so nothing but the order of the rounding is left
def whole_numbers(shape, dtype, device):
    return torch.randint(-8, 9, shape).to(device, dtype)


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bits_are_those_of_hugging_face_s_llama(dtype, device):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(256, eps=1e-5).to(device, dtype)
    norm.weight.data.normal_()
    x, residual = (whole_numbers((4, 256), dtype, device) for _ in range(2))
    x[x == 0] = 1.0
    # too small to be seen in the rounded sum, large enough to be seen in the norm of an unrounded one
    too_small = torch.full_like(x, torch.finfo(dtype).eps / 4)
    for addend in (residual, too_small):
        result = eagle_kernels.raw.rms_norm(x, norm.weight.data, addend, eps=1e-5)
        assert_equal("rms_norm", "Llama", "residual", result.residual, addend + x)
        check_bits("Llama", result.output, norm(addend + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bits_are_those_of_hugging_face_s_gemma(dtype, device):
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    norm = gemma.Gemma2RMSNorm(256, eps=1e-6).to(device, dtype)
    norm.weight.data.normal_()
    x = whole_numbers((4, 256), dtype, device)
    options = {"weight_offset": 1.0, "round_normalized": False}
    result = eagle_kernels.raw.rms_norm(x, norm.weight.data, **options)
    check_bits("Gemma", result.output, norm(x))


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_the_sum_is_rounded_or_not(weight_offset, device):
    """Of the sum in fp32 nearly each element is the one that is closest to the exact result."""
    values = make(8, 512, torch.float16, has_residual=True, device=device, weight_offset=weight_offset)
    exact = reference(**in_float64(values))
    parts_from_exact = {}
    for round_sum in (False, True):
        result = eagle_kernels.raw.rms_norm(**values, round_sum=round_sum, round_normalized=False)
        assert_equal("rms_norm", "sum", "residual", result.residual, exact.residual.half())
        parts_from_exact[round_sum] = (result.output != exact.output.half()).double().mean().item()
    assert parts_from_exact[False] < 0.01 and parts_from_exact[True] > 0.1, parts_from_exact


def test_without_a_residual_there_is_no_sum(device):
    values = make(3, 64, torch.float16, device=device)
    expected = eagle_kernels.raw.rms_norm(**values)
    result = eagle_kernels.raw.rms_norm(**values, round_sum=False)
    assert_equal("rms_norm", "", "output", result.output, expected.output)


def check_bits(case, output, expected):
    """Equal on the CPU; on a GPU torch's rsqrt is an approximation, which ours is not."""
    if output.is_cuda:
        assert_close("rms_norm", case, "output", output, expected.detach().double())
    else:
        assert_equal("rms_norm", case, "output", output, expected.detach())


@pytest.mark.gpu
def test_rows_past_two_billion_elements(device):
    x = torch.zeros(2**19 + 1, 4096, dtype=torch.bfloat16, device=device)
    x[-1].normal_()
    weight = torch.randn(4096, device=device).bfloat16()
    expected = eagle_kernels.raw.rms_norm(x[-1:].clone(), weight)
    eagle_kernels.raw.rms_norm(x, weight, out=(x, x[:0]))
    assert not x[:-1].any()
    assert_equal("rms_norm", "far rows", "output", x[-1:], expected.output)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_size", [1, 7, 64, 127, 128, 1024, 2880, 4096, 5120, 6144, 8192, 18432, 65536])
def test_full_cross(hidden_size, dtype, device):
    for num_tokens, has_residual, is_rounded in itertools.product((1, 33), (False, True), (False, True)):
        values = make(num_tokens, hidden_size, dtype, has_residual=has_residual, device=device)
        for round_sum in (True, False)[: 1 + has_residual]:
            options = {"round_normalized": is_rounded, "round_sum": round_sum}
            check(values | options, f"{hidden_size} {dtype} {has_residual} {options}")
