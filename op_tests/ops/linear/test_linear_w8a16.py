"""linear_w8a16: every code. `test_quantised_linear` proves what it shares with linear_w4a16."""

import functools

import torch

import eagle_kernels
from eagle_kernels.reference.ops.linear.linear_w8a16 import dequantise
from eagle_kernels.reference.ops.linear.shared.packing import pack
from op_tests.harness import assert_equal, check_close
from op_tests.ops.linear.cases import make_quantised, quantised_cases, quantised_sweep

PATH = "linear.linear_w8a16"
make = functools.partial(make_quantised, 8)
check = functools.partial(check_close, PATH)

# tiles of 8, 16, 32, 64 and 128 rows, whose x is read by every program
MOST_VARIANTS = {"_quantised_tiles_kernel": 6}


def ahead_of_time_cases():
    yield from quantised_cases(make, (1, 16, 32, 64, 256))


def order_case():
    return make(3, 100, 300, torch.float16, has_order=True)


size_sweep = functools.partial(quantised_sweep, make)


def test_every_code(device):
    """All 256, in each place of a word."""
    codes = torch.arange(-128, 128).expand(16, -1)
    values = make(1, 16, 256, torch.bfloat16, group_size=None, device=device)
    values |= {"weight": pack(codes, 8).to(device), "scales": torch.ones(16, device=device)}
    assert torch.equal(
        dequantise(values["x"], values["weight"], values["scales"], None, None)[3].cpu().long(), codes[3]
    )
    for shift in range(4):
        x = torch.eye(256, device=device).bfloat16().roll(shift, 1)
        result = eagle_kernels.raw.linear_w8a16(**values | {"x": x})
        assert_equal("linear_w8a16", f"shift {shift}", "output", result[:, 0].cpu().long(), codes[0].roll(-shift))


def wrong_calls():
    values = make(3, 40, 300, torch.float16, has_zeros=True)
    yield values | {"group_size": 16}, "group_size must be None, 32, 64 or 128, got 16"
    narrow = values["weight"][..., :16].contiguous()
    yield values | {"weight": narrow}, r"weight must have shape \[S, 3, 16, 32\], got \[3, 3, 16, 16\]"
