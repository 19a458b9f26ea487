"""linear_w4a16 against float64: groups, zero points, orders of columns, all tiles, rows on their own."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.linear import linear_w4a16 as module
from eagle_kernels.reference.ops.linear.linear_w4a16 import dequantise
from eagle_kernels.runtime import launch, target
from op_tests.harness import assert_equal, check_close
from op_tests.harness.retune import retune
from op_tests.ops.linear.cases import designs, make_quantised

PATH = "linear.linear_w4a16"
DTYPES = (torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128, None)
make = functools.partial(make_quantised, 4)
check = functools.partial(check_close, PATH)

# tiles of 8, 16, 32, 64 and 128 rows, whose x is read by every program
MOST_VARIANTS = {"_quantised_tiles_kernel": 6}


def ahead_of_time_cases():
    for num_rows, num_outputs in itertools.product((1, 16, 32, 64, 128, 256), (64, 16384)):
        yield f"T={num_rows} N={num_outputs}", make(num_rows, num_outputs, 256, torch.bfloat16, has_bias=num_rows == 1)
    for group_size, dtype in itertools.product(GROUPS, DTYPES):
        values = make(8, 64, 512, dtype, group_size=group_size, has_zeros=dtype == torch.float16)
        yield f"{group_size} columns {dtype}", values
        yield f"{group_size} columns {dtype} alike", values | {"deterministic": True, "prefetch_weight": True}
    yield "zeros", make(256, 64, 256, torch.bfloat16, has_zeros=True)
    yield "order", make(3, 64, 200, torch.bfloat16, has_order=True)
    yield "parts", make(64, 64, 256, torch.float16) | {"num_parts": 2}
    yield "prefetched", make(8, 64, 1152, torch.bfloat16) | {"prefetch_weight": True}


def order_case():
    return make(3, 100, 300, torch.float16, has_order=True)


def size_sweep():
    for num_rows, num_outputs in itertools.product(range(1, 17), (1, 16, 33, 1000)):
        yield make(num_rows, num_outputs, 128, torch.float16)
    for num_rows in (17, 32, 33, 64, 65, 100):
        yield make(num_rows, 40, 128, torch.float16)


@pytest.mark.parametrize("group_size", GROUPS)
def test_matches_reference(group_size, device):
    """Odd sizes: K below a group and no multiple of one, N no multiple of a strip."""
    sizes = ((3, 40, 300), (1, 1, 1), (20, 33, 130), (2, 17, 70))
    for index, ((num_rows, num_outputs, num_columns), has_zeros) in enumerate(itertools.product(sizes, (False, True))):
        values = make(
            num_rows, num_outputs, num_columns, DTYPES[index % 2], group_size=group_size, has_zeros=has_zeros,
            has_order=index % 3 == 0, has_bias=index % 2 == 0, device=device,
        )  # fmt: skip
        check(values, f"{num_rows} x {num_outputs} x {num_columns} zeros {has_zeros}")


@pytest.mark.parametrize("num_rows", [1, 8, 9, 17, 33, 65, 130, 257])
def test_every_number_of_rows(num_rows, device):
    check(make(num_rows, 35, 200, torch.float16, has_bias=True, device=device), f"T = {num_rows}")


def test_by_hand(device):
    """A weight in each place of a word, with a scale and a zero point of its own group."""
    values = make(1, 16, 256, torch.float16, group_size=32, has_zeros=True, device=device)
    weights = dequantise(values["x"], *(values[name] for name in ("weight", "scales", "zeros", "group_size")))
    for column in (*range(0, 256, 17), 255):
        x = torch.zeros_like(values["x"])
        x[0, column] = 1.0
        result = eagle_kernels.raw.linear_w4a16(**values | {"x": x})
        assert_equal("linear_w4a16", f"column {column}", "output", result[0], weights[:, column])


@pytest.mark.parametrize(("num_columns", "num_parts"), [(100, 1), (129, 2), (650, 5)])
def test_parts(num_columns, num_parts, device):
    """Weights are whole numbers, which 16 bits hold: parts are not rounded."""
    for num_rows in (1, 20):
        values = make(num_rows, 40, num_columns, torch.float16, has_zeros=True, has_bias=True, device=device)
        values |= {"scales": torch.ones_like(values["scales"])}
        parts = check(values | {"num_parts": num_parts}, f"{num_parts} parts of {num_columns}")
        assert parts.dtype == torch.float32 and len(parts) == num_parts


@pytest.mark.parametrize("rows", designs(module.TUNING, {"rows_left": 1}), ids=str)
def test_every_entry(rows, device, monkeypatch):
    """Each tile, also where a program makes fewer outputs than it has place for."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: 3)
    retune(monkeypatch, module.TUNING, **rows)
    for num_columns in (300, 1200) if rows["column_warps"] > 1 else (700,):
        values = make(min(rows["block_row"] + 3, 20), 70, num_columns, torch.float16, has_zeros=True, device=device)
        expected = check(values, f"K = {num_columns}")
        result = eagle_kernels.raw.linear_w4a16(**values, prefetch_weight=True)
        assert_equal("linear_w4a16", f"K = {num_columns} prefetched", "output", result, expected)


@pytest.mark.parametrize("group_size", [32, 128, None])
def test_deterministic_rows_are_as_they_are_alone(group_size, device):
    """Bit by bit. The interpreter's order depends on the place: there, whole numbers, whose sums are exact."""
    values = make(70, 40, 300, torch.float16, group_size=group_size, has_zeros=True, device=device)
    if device.type == "cpu":
        values |= {"x": (8 * values["x"]).round(), "scales": torch.ones_like(values["scales"])}
    values |= {"deterministic": True}
    together = eagle_kernels.raw.linear_w4a16(**values)
    for num_rows in (1, 2, 16, 17, 33):
        for prefetch_weight in (False, True):
            few = values | {"x": values["x"][:num_rows], "prefetch_weight": prefetch_weight}
            result = eagle_kernels.raw.linear_w4a16(**few)
            assert_equal("linear_w4a16", f"T = {num_rows}", "output", result, together[:num_rows])


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


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUPS)
def test_full_cross(group_size, dtype, device):
    for num_outputs, num_columns in itertools.product((1, 64, 1000, 6144, 28672), (7, 128, 896, 4096, 14336)):
        for num_rows, has_zeros in itertools.product((1, 2, 8, 16, 17, 32, 33, 64, 128, 300), (False, True)):
            values = make(
                num_rows, num_outputs, num_columns, dtype, group_size=group_size, has_zeros=has_zeros, device=device
            )
            check(values, f"T = {num_rows} {num_outputs} x {num_columns}")
