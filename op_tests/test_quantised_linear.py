"""What linear ops with weights of 4 and of 8 bits keep alike, whose kernels they share, against float64."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import launch, target

from .harness import assert_equal, retune
from .harness.ahead_of_time import module_of_tests
from .harness.cases import module_of_op
from .ops.linear.cases import DTYPES, GROUPS, designs

PATHS = ["linear.linear_w4a16", "linear.linear_w8a16"]
# entries whose tiles may also leave rows to each other
DESIGNS = [
    (path, rows)
    for path, others in zip(PATHS, ([{"rows_left": 1}], []))
    for rows in designs(module_of_op(path).TUNING, *others)
]


def op_of(path: str):
    return getattr(eagle_kernels.raw, path.rpartition(".")[2])


@pytest.mark.smoke
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("path", PATHS)
def test_matches_reference(path, group_size, device):
    """Odd sizes: K below a group and no multiple of one, N no multiple of a strip."""
    module, sizes = module_of_tests(path), ((3, 40, 300), (1, 1, 1), (20, 33, 130), (2, 17, 70))
    for index, ((num_rows, num_outputs, num_columns), has_zeros) in enumerate(itertools.product(sizes, (False, True))):
        values = module.make(
            num_rows, num_outputs, num_columns, DTYPES[index % 2], group_size=group_size, has_zeros=has_zeros,
            has_order=index % 3 == 0, has_bias=index % 2 == 0, device=device,
        )  # fmt: skip
        module.check(values, f"{num_rows} x {num_outputs} x {num_columns} zeros {has_zeros}")


@pytest.mark.parametrize("num_rows", [1, 8, 9, 17, 33, 65, 130, 257])
@pytest.mark.parametrize("path", PATHS)
def test_every_number_of_rows(path, num_rows, device):
    module = module_of_tests(path)
    module.check(module.make(num_rows, 35, 200, torch.float16, has_bias=True, device=device), f"T = {num_rows}")


@pytest.mark.parametrize(("num_columns", "num_parts"), [(100, 1), (129, 2), (650, 5)])
@pytest.mark.parametrize("path", PATHS)
def test_parts(path, num_columns, num_parts, device):
    """Weights are whole numbers, which 16 bits hold: parts are not rounded."""
    module = module_of_tests(path)
    for num_rows in (1, 20):
        values = module.make(num_rows, 40, num_columns, torch.float16, has_zeros=True, has_bias=True, device=device)
        values |= {"scales": torch.ones_like(values["scales"])}
        parts = module.check(values | {"num_parts": num_parts}, f"{num_parts} parts of {num_columns}")
        assert parts.dtype == torch.float32 and len(parts) == num_parts


@pytest.mark.parametrize(("path", "rows"), DESIGNS, ids=str)
def test_every_entry(path, rows, device, monkeypatch):
    """Each tile, also where a program makes fewer outputs than it has place for."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: 3)
    retune(monkeypatch, module_of_op(path).TUNING, **rows)
    for num_columns in (300, 1200) if rows["column_warps"] > 1 else (700,):
        values = module_of_tests(path).make(
            min(rows["block_row"] + 3, 20), 70, num_columns, torch.float16, has_zeros=True, device=device
        )
        expected = module_of_tests(path).check(values, f"K = {num_columns}")
        result = op_of(path)(**values, prefetch_weight=True)
        assert_equal(path, f"K = {num_columns} prefetched", "output", result, expected)


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("path", PATHS)
def test_deterministic_rows_are_as_they_are_alone(path, group_size, device):
    """Bit by bit, on a GPU in tiles of every size. The interpreter's order depends on the place: there, whole numbers,
    whose sums are exact."""
    sizes, rows, dtype = (300, 200, 1100), (1, 2, 16, 17, 33, 64, 65, 129), torch.bfloat16
    if device.type == "cpu":
        sizes, rows, dtype = (70, 40, 300), (1, 2, 16, 17, 33), torch.float16
    values = module_of_tests(path).make(*sizes, dtype, group_size=group_size, has_zeros=True, device=device)
    if device.type == "cpu":
        values |= {"x": (8 * values["x"]).round(), "scales": torch.ones_like(values["scales"])}
    values |= {"deterministic": True}
    together = op_of(path)(**values)
    for num_rows, prefetch_weight in itertools.product(rows, (False, True)):
        few = values | {"x": values["x"][:num_rows], "prefetch_weight": prefetch_weight}
        assert_equal(path, f"T = {num_rows}", "output", op_of(path)(**few), together[:num_rows])


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("path", PATHS)
def test_full_cross(path, group_size, dtype, device):
    module = module_of_tests(path)
    for num_outputs, num_columns in itertools.product((1, 64, 1000, 6144, 28672), (7, 128, 896, 4096, 14336)):
        for num_rows, has_zeros in itertools.product((1, 2, 8, 16, 17, 32, 33, 64, 128, 300), (False, True)):
            values = module.make(
                num_rows, num_outputs, num_columns, dtype, group_size=group_size, has_zeros=has_zeros, device=device
            )
            module.check(values, f"T = {num_rows} {num_outputs} x {num_columns}")
