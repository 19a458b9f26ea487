"""silu_and_mul against float64 and PyTorch: packed and apart, odd sizes, strided rows, and in place."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import eagle_kernels
from eagle_kernels.reference.ops.nn.silu_and_mul import silu_and_mul as reference
from op_tests.harness import assert_close, assert_equal, check_close
from op_tests.harness.cases import in_float64
from op_tests.ops.nn.cases import make_silu as make

PATH = "nn.silu_and_mul"
SIZES = (1, 3, 8, 127, 1024, 1025, 2880)


check = functools.partial(check_close, PATH)


def ahead_of_time_cases():
    yield "packed bfloat16", make(2, 14336, torch.bfloat16)
    yield "apart float16", make(2, 14336, torch.float16, is_packed=False)
    yield "packed float32", make(2, 14336, torch.float32)
    yield "packed bfloat16 fused", make(2, 14336, torch.bfloat16) | {"round_activation": False}
    yield "packed odd", make(2, 2881, torch.bfloat16)


def order_case():
    return make(3, 2050, torch.float32)


def size_sweep():
    for num_tokens in (1, 2, 3, 16, 17, 64, 257, 4096):
        yield make(num_tokens, 64, torch.float16)
        yield {"gate": torch.zeros(num_tokens, 128 + num_tokens, dtype=torch.float16)[:, :128]}


@pytest.mark.parametrize("num_columns", SIZES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_matches_reference(num_columns, is_packed, device):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = make(3, num_columns, dtype, is_packed=is_packed, device=device)
        for round_activation in (True, False):
            check(values | {"round_activation": round_activation}, f"I = {num_columns} {dtype} {round_activation}")


def test_both_forms_agree(device):
    packed = make(3, 1100, torch.float16, device=device)["gate"]
    expected = eagle_kernels.raw.silu_and_mul(packed)
    for gate, up in ((packed[:, :1100], packed[:, 1100:]), packed.contiguous().chunk(2, dim=-1)):
        assert_equal("silu_and_mul", "forms", "output", eagle_kernels.raw.silu_and_mul(gate, up), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates(device):
    """Far out silu is 0 or the gate itself; nothing overflows on the way. NaN stays with its element."""
    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 1e30, float("inf"), 1.0, 2.0]], device=device)
    up = torch.tensor([[2.0] * 8 + [float("nan"), 3.0]], device=device)
    result = eagle_kernels.raw.silu_and_mul(gate, up)
    assert_close("silu_and_mul", "large", "output", result, F.silu(gate.double()) * up.double())
    assert result.isnan().sum() == 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_in_place(is_packed, device):
    values = make(4, 1100, torch.float32, is_packed=is_packed, device=device)
    expected = eagle_kernels.raw.silu_and_mul(**values)
    rest = values["gate"][:, 1100:].clone()
    out = values["gate"][:, :1100]
    assert eagle_kernels.raw.silu_and_mul(**values, out=out) is out
    assert_equal("silu_and_mul", "in place", "output", out, expected)
    assert_equal("silu_and_mul", "in place", "(input) up", values["gate"][:, 1100:], rest)


def test_without_tokens_or_columns(device):
    for num_tokens, num_columns in ((0, 64), (3, 0)):
        values = make(num_tokens, num_columns, torch.float16, device=device)
        assert eagle_kernels.raw.silu_and_mul(**values).shape == (num_tokens, num_columns)


def test_rounds_where_pytorch_rounds(device):
    """F.silu(gate) * up of the engine's MLP and of Hugging Face's models: silu is rounded before the product.

    The last bit of the fp32 exponential is a matter of the machine, and may once in a while show in fp16.
    """
    gate, up = make(3, 1000, torch.float16, is_packed=False, device=device).values()
    result, expected = eagle_kernels.raw.silu_and_mul(gate, up), F.silu(gate) * up
    assert (result != expected).sum() <= 3


def test_the_product_alone_is_rounded(device):
    """Then nearly each element is the one that is closest to the exact result."""
    values = make(4, 1000, torch.float16, device=device)
    exact = reference(**in_float64(values)).half()
    for round_activation, least, most in ((False, 0.0, 0.01), (True, 0.1, 1.0)):
        result = eagle_kernels.raw.silu_and_mul(**values, round_activation=round_activation)
        assert least <= (result != exact).double().mean() < most


def test_a_row_knows_no_other(device):
    values = make(6, 130, torch.float32, device=device)
    before = eagle_kernels.raw.silu_and_mul(**values)
    values["gate"][1:5] = float("nan")
    after = eagle_kernels.raw.silu_and_mul(**values)
    assert after[1:5].isnan().all() and torch.equal(after[[0, 5]], before[[0, 5]])
    assert torch.equal(eagle_kernels.raw.silu_and_mul(values["gate"][5:])[0], before[5])


@pytest.mark.gpu
def test_rows_past_two_billion_elements(device):
    gate = torch.zeros(2**17 + 1, 2**14, dtype=torch.bfloat16, device=device)
    gate[-1].normal_()
    result = eagle_kernels.raw.silu_and_mul(gate)
    assert not result[:-1].any()
    assert_equal("silu_and_mul", "far rows", "output", result[-1:], eagle_kernels.raw.silu_and_mul(gate[-1:].clone()))


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_full_cross(dtype, device):
    sizes = itertools.product((1, 7, 64, 1000, 5504, 14336, 28672), (1, 33), (True, False), (True, False))
    for num_columns, num_tokens, is_packed, round_activation in sizes:
        values = make(num_tokens, num_columns, dtype, is_packed=is_packed, device=device)
        check(values | {"round_activation": round_activation}, f"{num_columns} {dtype} {round_activation}")
