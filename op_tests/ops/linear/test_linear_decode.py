"""linear_decode against float64 and PyTorch's sums in fp32: one row and several, odd sizes, strides, biases."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.linear import linear_decode as module
from eagle_kernels.ops.linear.shared import few_rows, many_rows
from eagle_kernels.reference.ops.linear.linear_decode import linear_decode as reference
from eagle_kernels.runtime import launch, target
from op_tests.harness import assert_close, assert_equal, check_close, replay_in_graph
from op_tests.harness.cases import in_float64
from op_tests.harness.retune import retune
from op_tests.ops.linear.cases import make_linear as make

PATH = "linear.linear_decode"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# (N, K): below every tile and one more than a tile; not a multiple of 16 bytes; several tiles, the last one partial
SIZES = ((40, 1025), (1, 1), (5, 3), (33, 16), (65, 1096), (7, 2048), (32, 3000))


# tiles of 32, 64 and 256 rows: half of a tile's reading of x is wasted on rows that do not exist
MOST_VARIANTS = {"_linear_decode_tiles_kernel": 3}


check = functools.partial(check_close, PATH)


MAY_SPILL = {"T=64 odd"}  # rows of no multiple of 16 bytes, read element by element: no model has them


def ahead_of_time_cases():
    for num_rows, dtype in itertools.product((1, 8), DTYPES):
        yield f"T={num_rows} {dtype}", make(num_rows, 64, 4096, dtype, has_bias=dtype == torch.float16)
        yield f"T={num_rows} {dtype} few columns", make(num_rows, 64, 256, dtype)
        yield f"T={num_rows} {dtype} partial tile", make(num_rows, 64, 3592, dtype)
    for num_rows, num_outputs in itertools.product((16, 32, 64, 256), (64, 5120, 16384)):
        if num_rows <= 64 or num_outputs == 64:
            values = make(num_rows, num_outputs, 256, torch.bfloat16, has_bias=True)
            yield f"T={num_rows} N={num_outputs}", values | {"deterministic": True}
    yield "parts", make(64, 64, 256, torch.float16) | {"num_parts": 2}
    yield "T=64 odd", make(64, 64, 257, torch.bfloat16)
    yield "T=32 prefetched", make(32, 64, 256, torch.bfloat16) | {"prefetch_weight": True}
    for num_rows in (1, 8):
        yield f"T={num_rows} odd", make(num_rows, 64, 4097, torch.bfloat16)
        yield f"T={num_rows} prefetched", make(num_rows, 64, 4096, torch.bfloat16) | {"prefetch_weight": True}


def order_case():
    return make(3, 100, 70, torch.float32, has_bias=True)


def size_sweep():
    for num_rows in range(1, 17):
        for num_outputs in (1, 16, 33, 1000):
            yield make(num_rows, num_outputs, 64, torch.float16)
            if num_rows > 1:  # one row is another variant in every dtype
                yield make(num_rows, num_outputs, 64, torch.float32)
        wide = torch.zeros(num_rows, 64 + 8 * num_rows, dtype=torch.float16)
        yield make(num_rows, 16, 64, torch.float16) | {"x": wide[:, :64]}
        yield make(16 + 15 * num_rows, 16, 64, torch.float16)
        odd = torch.zeros(num_rows, 65 + 2 * num_rows, dtype=torch.float16)
        yield make(num_rows, 16, 64, torch.float16) | {"x": odd[:, :64]}


@pytest.mark.cross
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_rows", [3, 1, 16])
def test_matches_reference(num_rows, size, device):
    for index, dtype in enumerate(DTYPES):
        has_bias = (num_rows + index) % 2 == 0
        check(make(num_rows, *size, dtype, has_bias=has_bias, device=device), f"T = {num_rows} {size} {dtype}")


@pytest.mark.parametrize("num_rows", range(1, 17))
def test_every_number_of_rows(num_rows, device):
    check(make(num_rows, 37, 80, torch.float16, has_bias=True, device=device), f"T = {num_rows}")


@pytest.mark.cross
@pytest.mark.parametrize("num_rows", [17, 30, 64])
def test_more_rows_in_fp32(num_rows, device):
    check(make(num_rows, 37, 80, torch.float32, has_bias=True, device=device), f"T = {num_rows}")


@pytest.mark.parametrize("num_rows", [17, 33, 64, 100, 256])
def test_many_rows(num_rows, device):
    for index, size in enumerate(((1, 1), (33, 16), (40, 1025), (130, 200))):
        dtype = (torch.float16, torch.bfloat16)[index % 2]
        check(make(num_rows, *size, dtype, has_bias=index > 1, device=device), f"T = {num_rows} {size}")


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("num_columns", "num_parts"), [(100, 1), (129, 2), (640, 2), (650, 5), (1024, 8)])
def test_parts(num_rows, num_columns, num_parts, device):
    """Each part is the reference's, so that their bounds are; together they are the whole product."""
    values = make(num_rows, 70, num_columns, torch.float16, has_bias=True, device=device)
    parts = check(values | {"num_parts": num_parts}, f"{num_parts} parts of {num_columns}")
    assert parts.dtype == torch.float32
    assert_close("linear_decode", "sum", "output", parts.sum(0).half(), reference(**in_float64(values)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_parts", [None, 2])
def test_deterministic_rows_are_as_they_are_alone(num_parts, dtype, device):
    """Bit by bit, in tiles of every size, prefetched or not. The interpreter's order depends on the place: there, whole
    numbers, whose sums are exact."""
    values = make(256, 70, 1100, dtype, has_bias=True, device=device)
    if device.type == "cpu":
        values = {name: (8 * tensor).round() for name, tensor in values.items()}
    values |= {"num_parts": num_parts, "deterministic": True}
    together = eagle_kernels.raw.linear_decode(**values)
    for num_rows in (1, 2, 16, 17, 33, 64, 65):
        for prefetch_weight in (False, True):
            few = values | {"x": values["x"][:num_rows], "prefetch_weight": prefetch_weight}
            result = eagle_kernels.raw.linear_decode(**few)
            assert_equal("linear_decode", f"T = {num_rows}", "output", result, together[..., :num_rows, :])


def test_which_kernel_is_taken(device, monkeypatch):
    """Which the CPU's whole numbers cannot tell: deterministic rows all take that of many."""
    for architecture in many_rows.MACHINES:
        monkeypatch.setitem(many_rows.MACHINES, architecture, {"fast_rows": 0, "fast_outputs": 9})
    kernels = []
    with launch.intercept(lambda op, kernel, grid, arguments: kernels.append(kernel.__name__)):
        for num_rows, num_outputs, options in (
            (1, 8, {}), (16, 8, {}), (17, 8, {}), (1, 9, {}), (2, 9, {}), (1, 8, {"deterministic": True}),
            (1, 8, {"num_parts": 1}),
        ):  # fmt: skip
            eagle_kernels.raw.linear_decode(**make(num_rows, num_outputs, 64, torch.float16, device=device), **options)
    names = [kernel.removeprefix("_linear_decode_").removesuffix("_kernel") for kernel in kernels]
    assert names == ["plain", "rows", "tiles", "plain", "tiles", "tiles", "tiles"]


@pytest.mark.parametrize("rows", [row for rows in many_rows.TUNING.values() for row in rows], ids=str)
def test_every_entry_of_many_rows(rows, device, monkeypatch):
    """Each block of outputs, also where it makes fewer than it has place for, and parts."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    for architecture in many_rows.TUNING:
        monkeypatch.setitem(many_rows.TUNING, architecture, (rows | {"least_outputs": 0},))
        monkeypatch.setitem(many_rows.MACHINES, architecture, {"fast_rows": 0, "fast_outputs": 0})
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: 3)
    for num_rows, num_outputs, num_parts in ((13, 70, None), (13, 300, None), (200, 70, 2)):
        num_rows = min(num_rows, rows["max_rows"])
        values = make(num_rows, num_outputs, 300, torch.float16, has_bias=True, device=device)
        expected = check(values | {"num_parts": num_parts}, f"N = {num_outputs} {num_parts} parts")
        result = eagle_kernels.raw.linear_decode(**values, num_parts=num_parts, prefetch_weight=True)
        assert_equal("linear_decode", f"N = {num_outputs} {num_parts} parts", "output", result, expected)


def test_how_many_rows_it_is_for():
    small, large = torch.empty(512, 512, device="meta"), torch.empty(8192, 8192, device="meta")
    assert module.is_for(64, small) and not module.is_for(65, small)
    assert module.is_for(16, large) and not module.is_for(17, large)  # cuBLAS is faster
    for dtype in (torch.float16, torch.bfloat16):
        assert module.is_for(16, small.to(dtype)) and not module.is_for(17, small.to(dtype))
        assert module.parts_for(64, small.to(dtype)) is None  # nothing was measured on this device


def test_where_parts_are_faster(monkeypatch):
    monkeypatch.setitem(many_rows.MACHINES, "default", {"fast_rows": 64, "fast_outputs": 5120})
    square, wide = (torch.empty(size, 4096, device="meta", dtype=torch.bfloat16) for size in (4096, 6144))
    assert [module.parts_for(rows, square) for rows in (16, 17, 64, 65)] == [None, 2, 2, None]
    assert not module.is_for(64, square) and module.parts_for(64, wide) is None
    assert module.is_for(64, wide) and not module.is_for(65, wide)
    assert module.parts_for(64, square[:1000]) == 8 and module.parts_for(64, square[:1000, :300]) == 3
    assert module.parts_for(64, square.float()) is None


@pytest.mark.parametrize(("num_multiprocessors", "fast_rows"), [(80, 0), (114, 64), (132, 64)], ids=str)
def test_deterministic_rows_have_the_same_parts_whatever_their_number(num_multiprocessors, fast_rows, monkeypatch):
    """As many as the weight has room for, on every machine, also where rows of this number alone would have none."""
    monkeypatch.setitem(many_rows.MACHINES, "default", {"fast_rows": fast_rows, "fast_outputs": 5120})
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: num_multiprocessors)
    several = set()
    for num_outputs, num_columns in itertools.product((1, 64, 1000, 4096, 6144), (100, 300, 4096)):
        weight = torch.empty(num_outputs, num_columns, device="meta", dtype=torch.bfloat16)
        found = {module.parts_for(num_rows, weight, True) for num_rows in range(1, many_rows.MAX_ROWS + 1)}
        assert len(found) == 1, (num_outputs, num_columns)
        usual = {module.parts_for(num_rows, weight) for num_rows in range(1, many_rows.MAX_ROWS + 1)}
        assert usual <= found | {None}
        several |= found
    assert {None, 8} <= several


def test_prefetched_weights_are_the_same(device):
    for num_rows in (1, 4):
        values = make(num_rows, 37, 3000, torch.float16, has_bias=True, device=device)
        expected = eagle_kernels.raw.linear_decode(**values)
        result = eagle_kernels.raw.linear_decode(**values, prefetch_weight=True)
        assert_equal("linear_decode", f"T = {num_rows}", "output", result, expected)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "options"),
    [(1, torch.float32, {}), (4, torch.float32, {}), (20, torch.float16, {"num_parts": 3})],
)
def test_into_a_wider_tensor(num_rows, dtype, options, device):
    values = make(num_rows, 24, 300, dtype, has_bias=True, device=device) | options
    expected = eagle_kernels.raw.linear_decode(**values)
    wide = torch.full((*expected.shape[:-1], 30), float("nan"), device=device)
    out = wide[..., :24]
    assert eagle_kernels.raw.linear_decode(**values, out=out) is out
    assert_equal("linear_decode", "out", "output", out, expected)
    assert wide[..., 24:].isnan().all()


def test_without_outputs_or_rows(device):
    for num_rows, num_outputs in ((1, 0), (4, 0), (0, 32)):
        values = make(num_rows, num_outputs, 64, torch.float16, device=device)
        assert eagle_kernels.raw.linear_decode(**values).shape == (num_rows, num_outputs)


def test_sums_are_fp32(device):
    """Products and sums that no fp16 holds, and a difference that it would lose; TF32 would lose the fp32 one."""
    weight, x = torch.ones(16, 512, device=device), torch.ones(2, 512, device=device)
    weight[:, :2] = torch.tensor([60000.0, -60000.0])
    x[:, :2] = 2.0
    for rows in (x[:1], x):
        result = eagle_kernels.raw.linear_decode(rows.half(), weight.half())
        assert (result == 510).all()
    weight = torch.full((16, 16), 1.0 + 2.0**-20, device=device)
    for rows in (torch.ones(1, 16, device=device), torch.ones(2, 16, device=device)):
        assert (eagle_kernels.raw.linear_decode(rows, weight) == 16 + 2.0**-16).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_knows_no_other(dtype, device):
    """A row keeps its bits in any company and at any place; NaN and infinity stay in their rows.

    In fp16 the interpreter multiplies by NumPy, which sums up the same at the same place only.
    """
    values = make(6, 50, 1100, dtype, has_bias=True, device=device)
    before = eagle_kernels.raw.linear_decode(**values)
    x = values["x"].clone()
    x[1, 5], x[2, 7], x[3] = float("nan"), float("inf"), 0.0
    after = eagle_kernels.raw.linear_decode(**values | {"x": x})
    assert after[1].isnan().all() and not after[2].isfinite().any()
    assert torch.equal(after[3], values["bias"])
    assert torch.equal(after[[0, 4, 5]], before[[0, 4, 5]])
    companies = [[0, 1], [0, 1, 2]]
    if device.type == "cuda" or dtype == torch.float32:
        companies += [[5, 0], [1, 5, 2], [5] * 16]
    for company in companies:
        result = eagle_kernels.raw.linear_decode(**values | {"x": values["x"][company]})
        assert torch.equal(result, before[company])


@pytest.mark.cross
@pytest.mark.parametrize("num_columns", [80, 640, 1100, 4096])
def test_a_row_in_fp32_is_as_it_is_alone(num_columns, device):
    """Bit by bit, with one tile of columns or several: no compiler chooses which products it fuses with which sums."""
    values = make(64, 30, num_columns, torch.float32, has_bias=True, device=device)
    together = eagle_kernels.raw.linear_decode(**values)
    for row in (0, 1, 2, 3, 30, 63):
        alone = eagle_kernels.raw.linear_decode(**values | {"x": values["x"][row : row + 1]})
        assert_equal("linear_decode", f"row {row}", "output", alone, together[row : row + 1])
    for num_rows in (2, 5, 16):
        few = eagle_kernels.raw.linear_decode(**values | {"x": values["x"][:num_rows]})
        assert_equal("linear_decode", f"T = {num_rows}", "output", few, together[:num_rows])


def test_one_row_is_summed_in_another_order(device):
    """In fp16 and bf16: the same up to rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        values = make(2, 50, 1100, dtype, device=device)
        both = eagle_kernels.raw.linear_decode(**values)
        alone = eagle_kernels.raw.linear_decode(**values | {"x": values["x"][1:]})
        assert_close("linear_decode", "alone", "output", alone, both[1:])


def test_a_row_of_weight_knows_no_other(device):
    """An output keeps its bits in any block; NaN among the weights makes NaN of its output alone.

    Whole numbers, whose sums are exact: the interpreter's order of summation depends on the place.
    """
    for num_rows in (1, 4):
        values = make(num_rows, 50, 700, torch.float32, device=device)
        if device.type == "cpu":
            values = {name: (100 * tensor).round() for name, tensor in values.items()}
        before = eagle_kernels.raw.linear_decode(**values)
        order = torch.randperm(50, device=device)
        weight = values["weight"][order]
        weight[order == 7] = float("nan")
        after = eagle_kernels.raw.linear_decode(values["x"].clone(), weight)
        assert after[:, order == 7].isnan().all()
        assert torch.equal(after[:, order != 7], before[:, order[order != 7]])


HALF, SINGLE = (few_rows.TUNING, (1, 4), torch.float16), (few_rows.SINGLE_TUNING, (1, 21), torch.float32)


@pytest.mark.parametrize(
    ("table", "numbers"),
    [
        (HALF, {"block_output": 16, "block_column": 512, "num_warps": 2}),
        (HALF, {"block_output": 4, "block_column": 2048, "num_warps": 8}),
        (HALF, {"uses_dot": True, "block_output": 64, "num_warps": 4, "num_stages": 3}),
        pytest.param(SINGLE, {"block_output": 4, "block_column": 256, "num_warps": 1}, marks=pytest.mark.slow),
        pytest.param(SINGLE, {"block_output": 2, "block_column": 1024, "num_warps": 8}, marks=pytest.mark.slow),
    ],
)
def test_tuning_changes_rounding_alone(table, numbers, device, monkeypatch):
    tuning, counts, dtype = table
    retune(monkeypatch, tuning, **numbers)
    for num_rows in counts:
        check(make(num_rows, 70, 3000, dtype, has_bias=True, device=device), f"T = {num_rows} {numbers}")


def test_rows_are_tuned_alike():
    """A row's bits follow from the tuning, so two rows and sixteen must get the same, one row its own, in fp32 all."""
    for rows in few_rows.TUNING.values():
        assert {row["max_rows"] for row in rows} <= {1, few_rows.MAX_ROWS} and rows[-1]["max_rows"] == few_rows.MAX_ROWS
        assert all(row["uses_dot"] for row in rows if row["max_rows"] > 1)
    for rows in few_rows.SINGLE_TUNING.values():
        most_columns = [row["most_columns"] for row in rows]
        assert most_columns == sorted(most_columns) and most_columns[-1] == 2**31


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8])
def test_waits_for_x(num_rows, device):
    """A chain in which each input is the output before: an early read of it would show, and so would a late one.

    With the weights of whole numbers and a shift of places all sums are exact. A hundred runs give the same bits.
    """
    size = 2048
    weights = [torch.eye(size, device=device).roll(shift, 0).bfloat16() for shift in range(1, 9)]
    start = torch.randint(-100, 100, (num_rows, size), device=device).bfloat16()
    buffers = [torch.empty_like(start) for _ in range(2)]

    def rounds():
        x = start
        for index, weight in enumerate(weights * 8):
            x = eagle_kernels.raw.linear_decode(x, weight, prefetch_weight=True, out=buffers[index % 2])

    graph = replay_in_graph(rounds)
    expected = start.roll(8 * sum(range(1, 9)), 1)
    for _ in range(100):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert_equal("linear_decode", "chained", "output", buffers[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8])
def test_waits_for_weights(num_rows, device):
    """Unless the caller says that they are there, it reads no weights before the kernel that writes them has ended."""
    size, rounds = 2048, 32
    shift = torch.eye(size, device=device).roll(1, 0).bfloat16()
    start = torch.randint(-100, 100, (16, size), device=device).bfloat16()
    x = torch.zeros(num_rows, size, device=device, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weights = [torch.empty_like(start) for _ in range(rounds)]
    outputs = [torch.empty(num_rows, 16, device=device, dtype=torch.bfloat16) for _ in range(rounds)]

    def run():
        before = start
        for weight, output in zip(weights, outputs):
            eagle_kernels.raw.linear_decode(before, shift, out=weight)
            eagle_kernels.raw.linear_decode(x, weight, out=output)
            before = weight

    graph = replay_in_graph(run)
    for _ in range(100):
        for buffer in weights:
            buffer.fill_(float("nan"))
        graph.replay()
        for number, output in enumerate(outputs):
            expected = start.roll(number + 1, 1)[:, 0].expand(num_rows, -1)
            assert_equal("linear_decode", f"weights {number}", "output", output, expected.contiguous())


@pytest.mark.gpu
def test_weights_past_two_billion_elements(device):
    """The last rows of weight are as they are alone."""
    weight = torch.zeros(2**19 + 3, 4096, dtype=torch.bfloat16, device=device)
    weight[-64:].normal_()
    for num_rows in (1, 8):
        x = torch.randn(num_rows, 4096, device=device).bfloat16()
        result = eagle_kernels.raw.linear_decode(x, weight)
        assert not result[:, :-64].any()
        last = eagle_kernels.raw.linear_decode(x, weight[-64:])  # perhaps by another kernel
        assert_close("linear_decode", "far rows", "output", result[:, -64:].contiguous(), last)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_cross(dtype, device):
    for num_outputs, num_columns in itertools.product((1, 64, 1000, 6144), (1, 7, 64, 896, 2880, 3584, 4096, 14336)):
        for num_rows, has_bias in itertools.product((1, 2, 8, 16, *((64,) * (dtype == torch.float32))), (False, True)):
            values = make(num_rows, num_outputs, num_columns, dtype, has_bias=has_bias, device=device)
            check(values, f"T = {num_rows} {num_outputs} x {num_columns} {dtype}")
