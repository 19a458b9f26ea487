"""linear_w4a16 beside what `test_quantised_linear` proves of it: places of a word, entries, rows on their own."""

import functools
import itertools

import torch

import eagle_kernels
from eagle_kernels.ops.linear import linear_w4a16 as module
from eagle_kernels.reference.ops.linear.linear_w4a16 import dequantise
from op_tests.harness import assert_equal, check_close
from op_tests.ops.linear.cases import make_quantised, quantised_cases, quantised_sweep

PATH = "linear.linear_w4a16"
make = functools.partial(make_quantised, 4)
check = functools.partial(check_close, PATH)

# tiles of 8, 16, 32, 64 and 128 rows, whose x is read by every program
MOST_VARIANTS = {"_quantised_tiles_kernel": 6}


def ahead_of_time_cases():
    yield from quantised_cases(make, (1, 16, 32, 64, 128, 256))
    yield "prefetched", make(8, 64, 1152, torch.bfloat16) | {"prefetch_weight": True}


def order_case():
    return make(3, 100, 300, torch.float16, has_order=True)


size_sweep = functools.partial(quantised_sweep, make)


def test_by_hand(device):
    """A weight in each place of a word, with a scale and a zero point of its own group."""
    values = make(1, 16, 256, torch.float16, group_size=32, has_zeros=True, device=device)
    weights = dequantise(values["x"], *(values[name] for name in ("weight", "scales", "zeros", "group_size")))
    for column in (*range(0, 256, 17), 255):
        x = torch.zeros_like(values["x"])
        x[0, column] = 1.0
        result = eagle_kernels.raw.linear_w4a16(**values | {"x": x})
        assert_equal("linear_w4a16", f"column {column}", "output", result[0], weights[:, column])


def test_which_entry_is_taken():
    """Rows that must be alike have tiles of 16 rows and more, and no sums of their own kind, on all machines."""
    for table in module.TUNING.values():
        for num_rows, num_outputs in itertools.product((1, 8, 9, 16, 32, 64, 1000), (64, 8192, 32768)):
            fitting = [
                row for row in table if num_rows <= row["max_rows"] and num_outputs >= row["least_outputs"]
                and row["column_warps"] == 1 and not row["late"] and row["block_row"] >= 16
            ]  # fmt: skip
            assert fitting, (num_rows, num_outputs)


def test_a_row_knows_no_other(device):
    values = make(4, 40, 300, torch.float16, has_zeros=True, device=device)
    before = eagle_kernels.raw.linear_w4a16(**values)
    x = values["x"].clone()
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    after = eagle_kernels.raw.linear_w4a16(**values | {"x": x})
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_into_a_wider_tensor(device):
    values = make(4, 24, 300, torch.float16, device=device)
    expected = eagle_kernels.raw.linear_w4a16(**values)
    wide = torch.full((4, 30), float("nan"), dtype=torch.float16, device=device)
    assert eagle_kernels.raw.linear_w4a16(**values, out=wide[:, :24]).data_ptr() == wide.data_ptr()
    assert_equal("linear_w4a16", "out", "output", wide[:, :24].contiguous(), expected)
    assert wide[:, 24:].isnan().all()


def test_without_rows_or_outputs(device):
    for num_rows, num_outputs in ((0, 32), (3, 0)):
        for has_order in (False, True):
            values = make(num_rows, num_outputs, 64, torch.float16, has_order=has_order, device=device)
            assert eagle_kernels.raw.linear_w4a16(**values).shape == (num_rows, num_outputs)


def wrong_calls():
    values = make(3, 40, 300, torch.float16, has_zeros=True)
    narrow = values["weight"][:, :2].contiguous()
    yield values | {"group_size": 96}, "group_size must be None, 32, 64 or 128, got 96"
    yield values | {"group_size": None}, r"scales must have shape \[N\], got \[2, 40, 2\]"
    yield values | {"group_size": 64}, r"scales must have shape \[3, N, 2\], got \[2, 40, 2\]"
    yield values | {"weight": narrow}, r"weight must have shape \[S, 3, 16, 16\], got \[3, 2, 16, 16\]"
    yield values | {"weight": values["weight"][:2]}, "scales must have N in 17..32 for 2 strips of weight, got 40"
    yield values | {"num_parts": 4}, r"num_parts must lie in 1\.\.3, got 4"
