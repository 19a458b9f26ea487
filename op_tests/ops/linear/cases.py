"""Arguments of the linear ops, as their tests and others need them."""

import itertools

import torch

from eagle_kernels.reference.ops.linear.shared.packing import pack, pair_groups
from op_tests.harness import to_device

DTYPES = (torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128, None)


def make_linear(num_rows, num_outputs, num_columns, dtype, *, has_bias=False, device="cpu"):
    values = {"weight": torch.randn(num_outputs, num_columns).to(device, dtype)}
    if has_bias:
        values["bias"] = (5.0 * torch.randn(num_outputs)).to(device, dtype)
    values["x"] = (torch.randn(num_rows, num_columns) / num_columns**0.5).to(device, dtype)
    return values


def make_quantised(
    bits, num_rows, num_outputs, num_columns, dtype, *, group_size=128, has_zeros=False, has_order=False,
    has_bias=False, device="cpu",
):  # fmt: skip
    """Arguments of linear_w4a16 or linear_w8a16, with sums of about one."""
    middle = 8 if bits == 4 else 0
    values = torch.randint(0, 1 << bits, (num_outputs, num_columns), dtype=torch.uint8)
    groups = 1 if group_size is None else -(-num_columns // group_size)
    scales = (0.5 + torch.rand(groups, num_outputs)) * 2.0 ** (2 - bits)
    zeros = torch.randint(middle - 3, middle + 4, (groups, num_outputs))
    if group_size is None:
        scales, zeros = scales[0].to(dtype), zeros[0].to(torch.uint8 if bits == 4 else torch.int8)
    else:
        scales, zeros = (
            pair_groups(each, group_size, num_columns) for each in (scales.to(dtype), zeros.to(torch.int16))
        )
    made = {
        "x": torch.randn(num_rows, num_columns).to(dtype) / num_columns**0.5, "weight": pack(values, bits),
        "scales": scales, "zeros": zeros if has_zeros else None,
        "columns": torch.randperm(num_columns).to(torch.int32) if has_order else None,
        "bias": torch.randn(num_outputs).to(dtype) if has_bias else None,
    }  # fmt: skip
    return to_device({name: value for name, value in made.items() if value is not None}, device) | {
        "group_size": group_size
    }


def quantised_cases(make, numbers_of_rows):
    """Ahead-of-time cases of linear_w4a16 or linear_w8a16."""
    for num_rows, num_outputs in itertools.product(numbers_of_rows, (64, 16384)):
        yield f"T={num_rows} N={num_outputs}", make(num_rows, num_outputs, 256, torch.bfloat16, has_bias=num_rows == 1)
    for group_size, dtype in itertools.product(GROUPS, DTYPES):
        values = make(8, 64, 512, dtype, group_size=group_size, has_zeros=dtype == torch.float16)
        yield f"{group_size} columns {dtype}", values
        yield f"{group_size} columns {dtype} alike", values | {"deterministic": True, "prefetch_weight": True}
    yield "zeros", make(256, 64, 256, torch.bfloat16, has_zeros=True)
    yield "order", make(3, 64, 200, torch.bfloat16, has_order=True)
    yield "parts", make(64, 64, 256, torch.float16) | {"num_parts": 2}


def quantised_sweep(make):
    for num_rows, num_outputs in itertools.product(range(1, 17), (1, 16, 33, 1000)):
        yield make(num_rows, num_outputs, 128, torch.float16)
    for num_rows in (17, 32, 33, 64, 65, 100):
        yield make(num_rows, 40, 128, torch.float16)


def make_fp8(num_rows, num_outputs, num_columns, dtype, *, is_blocked=False, has_bias=False, device="cpu", **options):
    """Arguments of linear_fp8, with every code that is a number, and sums of about one."""
    codes = torch.randint(0, 256, (num_outputs, num_columns), dtype=torch.uint8)
    codes = torch.where(codes % 128 == 127, 0, codes)
    shape = (-(-num_columns // 128), -(-num_outputs // 128)) if is_blocked else (num_outputs,)
    made = {
        "x": torch.randn(num_rows, num_columns).to(dtype) / num_columns**0.5, "weight": pack(codes, 8),
        "scales": (0.5 + torch.rand(shape)) / 128,
    }  # fmt: skip
    if has_bias:
        made["bias"] = torch.randn(num_outputs).to(dtype)
    return to_device(made, device) | options


def designs(table: dict, *others: dict) -> list[dict]:
    """The entries of a tuning table that differ in more than numbers of rows, outputs, stages and warps, and each with
    others' numbers where these change it."""
    rows = [row for entries in table.values() for row in entries]
    rows += [row | other for row in rows for other in others if any(row[name] != other[name] for name in other)]
    same = {"max_rows": 2**31, "least_outputs": 0, "num_stages": 2, "num_warps": 4}
    unique = {str(row | same): row | same for row in rows}
    return [row for row in unique.values() if row["column_warps"] > 1 or not row["rows_left"]]
