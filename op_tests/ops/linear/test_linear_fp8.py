"""linear_fp8 against float64: every code, scales of outputs and of blocks, x in 16 bit and in 8."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.linear import linear_fp8 as module
from eagle_kernels.reference.ops.linear.linear_fp8 import linear_fp8 as reference
from eagle_kernels.reference.ops.linear.linear_fp8 import rounded
from eagle_kernels.reference.ops.linear.shared.packing import decode_e4m3, pack
from eagle_kernels.runtime import launch, target
from eagle_kernels.runtime.language import is_interpreting
from op_tests.harness import assert_close, assert_equal, check_close
from op_tests.harness.cases import in_float64
from op_tests.harness.retune import retune
from op_tests.ops.linear.cases import DTYPES, designs, quantised_sweep
from op_tests.ops.linear.cases import make_fp8 as make

PATH = "linear.linear_fp8"
ACTIVATIONS = ("16bit", "token", "block")
check = functools.partial(check_close, PATH)

# tiles of 8, 16, 32, 64 and 128 rows, whose x is read by every program
MOST_VARIANTS = {"_quantised_tiles_kernel": 6}
NOT_SUPPORTED = {
    (f"{activations} blocks {is_blocked} {dtype}", machine)
    for activations, is_blocked, dtype, machine in itertools.product(
        ("token", "block"), (False, True), DTYPES, ("sm_80", "gfx942")
    )
} | {(f"token T={num_rows}", machine) for num_rows in (64, 256) for machine in ("sm_80", "gfx942")}


def ahead_of_time_cases():
    for activations, is_blocked, dtype in itertools.product(ACTIVATIONS, (False, True), DTYPES):
        values = make(8, 64, 512, dtype, is_blocked=is_blocked, activations=activations)
        yield f"{activations} blocks {is_blocked} {dtype}", values
    for num_rows, num_outputs in itertools.product((1, 16, 32, 64, 256), (64, 16384)):
        values = make(num_rows, num_outputs, 256, torch.bfloat16, is_blocked=True, has_bias=num_rows == 1)
        yield f"T={num_rows} N={num_outputs}", values
    for num_rows in (64, 256):
        yield f"token T={num_rows}", make(num_rows, 64, 256, torch.bfloat16, activations="token")
    yield "alike", make(3, 64, 200, torch.bfloat16, deterministic=True, prefetch_weight=True)
    yield "parts", make(64, 64, 256, torch.float16, num_parts=2)


def order_case():
    return make(3, 100, 300, torch.float16, activations="block")


size_sweep = functools.partial(quantised_sweep, make)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_matches_reference(activations, device):
    sizes = ((3, 48, 300), (1, 16, 1), (20, 272, 130), (2, 32, 70))
    for index, ((num_rows, num_outputs, num_columns), is_blocked) in enumerate(itertools.product(sizes, (False, True))):
        num_outputs -= 0 if is_blocked else 5
        values = make(
            num_rows, num_outputs, num_columns, DTYPES[index % 2], is_blocked=is_blocked, has_bias=index % 2 == 0,
            activations=activations, device=device,
        )  # fmt: skip
        check(values, f"{num_rows} x {num_outputs} x {num_columns} blocks {is_blocked}")


@pytest.mark.parametrize("num_rows", [1, 9, 17, 33, 130])
def test_every_number_of_rows(num_rows, device):
    for activations in ACTIVATIONS:
        check(make(num_rows, 48, 200, torch.float16, activations=activations, device=device), f"T = {num_rows}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(dtype, device):
    """All numbers, in each place of a word, the smallest ones among them; fp16 has room for all, too."""
    codes = torch.arange(256)
    codes = torch.where(codes % 128 == 127, 0, codes)
    values = make(1, 16, 256, dtype, device=device)
    values |= {"weight": pack(codes.expand(16, -1), 8).to(device), "scales": torch.ones(16, device=device)}
    expected = decode_e4m3(codes)
    assert torch.equal(expected, codes.to(torch.uint8).view(torch.float8_e4m3fn).double())
    for shift in range(4):
        x = torch.eye(256, device=device).to(dtype).roll(shift, 1)
        result = eagle_kernels.raw.linear_fp8(**values | {"x": x})
        assert_equal("linear_fp8", f"shift {shift}", "output", result[:, 0].cpu().double(), expected.roll(-shift))


@pytest.mark.parametrize("activations", ["token", "block"])
def test_rounded_rows(activations, device):
    """x as 8 bits hold it: a layer that copies it shows the codes."""
    x = torch.randn(5, 256, device=device).half() * torch.logspace(-3, 2, 256, device=device)
    x[3], x[4, 7] = 0.0, float("nan")
    weight = pack(torch.where(torch.eye(256) > 0, 0x38, 0), 8).to(device)  # 1.0
    scales = torch.ones(256, device=device)
    result = eagle_kernels.raw.linear_fp8(x.half(), weight, scales, activations=activations)
    expected = rounded(x.half(), 128 if activations == "block" else 256).half()
    expected[4] = float("nan")  # a NaN stays in its row, and takes all of it
    assert_equal("linear_fp8", activations, "output", result, expected)


@pytest.mark.parametrize("rows", designs(module.TUNING), ids=str)
def test_every_entry(rows, device, monkeypatch):
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: 3)
    for table in (module.TUNING, module.ROUNDED_TUNING):
        retune(monkeypatch, table, **rows)
    for activations in ("16bit", "block"):
        if activations == "16bit" or rows["column_warps"] == 1:
            values = make(
                min(rows["block_row"] + 3, 20), 80, 700, torch.float16, is_blocked=True, activations=activations,
                device=device,
            )  # fmt: skip
            expected = check(values, activations)
            result = eagle_kernels.raw.linear_fp8(**values, prefetch_weight=True)
            assert_equal("linear_fp8", f"{activations} prefetched", "output", result, expected)


def test_rounded_rows_are_handed_on_as_they_are():
    """As one tensor, not as a view: the plan of a call would take that for another one."""
    launches = []
    with target.assume("sm_90"), launch.intercept(lambda *each: launches.append(each[3])):
        eagle_kernels.raw.linear_fp8(**make(3, 48, 300, torch.float16, activations="token"))
    rounding, product, *_ = launches
    assert product["layer"].x is rounding["codes_ptr"] and product["layer"].x_scales is rounding["scales_ptr"]


def test_parts(device):
    for activations in ACTIVATIONS:
        values = make(20, 40, 650, torch.float16, has_bias=True, activations=activations, device=device)
        values |= {"scales": torch.full_like(values["scales"], 2.0**-6), "num_parts": 5}  # exact in fp16, with codes
        if activations == "16bit" or is_interpreting():
            parts = check(values, activations)
        else:  # tensor cores keep about 14 bits of sums of products of 8 bits
            parts = eagle_kernels.raw.linear_fp8(**values)
            assert_close("linear_fp8", activations, "output", parts.half(), reference(**in_float64(values)))
        assert parts.dtype == torch.float32 and len(parts) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_deterministic_rows_are_as_they_are_alone(activations, device):
    """Bit by bit, in tiles of every size. The interpreter's order depends on the place."""
    values = make(300, 208, 1100, torch.bfloat16, is_blocked=True, activations=activations, device=device)
    together = eagle_kernels.raw.linear_fp8(**values, deterministic=True)
    for num_rows, prefetch_weight in itertools.product((1, 2, 16, 17, 33, 64, 65, 129), (False, True)):
        few = values | {"x": values["x"][:num_rows], "prefetch_weight": prefetch_weight}
        result = eagle_kernels.raw.linear_fp8(**few, deterministic=True)
        assert_equal("linear_fp8", f"T = {num_rows}", "output", result, together[:num_rows])


def wrong_calls():
    values = make(3, 48, 300, torch.float16)
    blocks = torch.ones(3, 2)
    yield values | {"activations": "row"}, "activations must be one of '16bit', 'token', 'block', got 'row'"
    yield values | {"scales": blocks}, r"scales must have shape \[3, 1\], got \[3, 2\]"
    yield values | {"scales": values["scales"][:30]}, r"scales must have N in 33\.\.48 for 3 strips of weight, got 30"
