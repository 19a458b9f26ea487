"""gqa_decode against float64: every page size, group and head size, both page tables, poisoned pools."""

import functools
import inspect
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.attention.gqa_decode import TUNING, contract
from eagle_kernels.ops.attention.shared import ordered
from eagle_kernels.runtime.launch import intercept
from op_tests.harness import assert_close, assert_equal, assert_in_bounds, assume_multiprocessors, check_close, retune
from op_tests.harness.pools import with_pools

from .cases import EIGHT_BITS, WITHOUT_FLOAT8, of_every_dtype_and_head_dim, with_float8
from .cases import make_decode as make

# (head_dim, group, kv heads, page size, dtype, lengths): each value of an axis meets each of the next one at least once
SHAPES = [
    (16, 1, 2, 1, torch.float32, [0, 1, 63]),
    (64, 2, 2, 16, torch.float16, [64, 65, 0]),
    (80, 3, 1, 32, torch.float32, [127, 1]),
    (96, 5, 1, 64, torch.float16, [128, 129]),
    (112, 6, 2, 128, torch.float32, [31, 33]),
    (128, 7, 1, 256, torch.float16, [255, 257]),
    (128, 8, 1, 16, torch.float32, [15, 16, 17]),
    (192, 16, 1, 2, torch.float16, [40]),
    (256, 4, 2, 16, torch.float16, [70, 5]),
    (256, 1, 1, 8, torch.float32, [66]),
    (512, 4, 1, 16, torch.float16, [40]),
    (320, 2, 1, 4, torch.float32, [21]),
    (64, 20, 1, 16, torch.float32, [50]),  # more heads than a tile of rows
    (8, 2, 4, 16, torch.float16, [70, 3]),
    (160, 4, 1, 16, torch.float16, [33]),
]


check = functools.partial(check_close, "attention.gqa_decode", fields=("output", "lse"))
NOT_SUPPORTED = WITHOUT_FLOAT8


def ahead_of_time_cases():
    for head_dim, dtype in ((8, torch.bfloat16), (64, torch.float16), (80, torch.bfloat16), (96, torch.float16),
                            (112, torch.float16), (128, torch.float32), (192, torch.bfloat16), (256, torch.float16),
                            (256, torch.float32), (512, torch.bfloat16)):  # fmt: skip
        yield f"D={head_dim} {dtype}", make(head_dim, 4, 2, 16, dtype, [100])
    yield "D=128 bfloat16 csr", make(128, 8, 1, 1, torch.bfloat16, [100], form="csr")
    everything = make(128, 8, 2, 16, torch.float16, [100]) | {"window": 50, "soft_cap": 30.0, "sinks": torch.zeros(16)}
    yield "all that changes logits", everything
    yield "deterministic", everything | {"deterministic": True}
    everything["query"] = everything["query"].bfloat16()
    for dtype in EIGHT_BITS:
        yield str(dtype), with_float8(everything, dtype)
    # so many parts of one request that they are merged at once
    yield "one request D=128", make(128, 4, 2, 16, torch.bfloat16, [8000])
    yield "one request D=256", make(256, 8, 2, 16, torch.float16, [8000])
    yield "packed", with_pools(make(128, 8, 2, 16, torch.float16, [100]), "pthw")
    yield "planned", make(128, 4, 2, 16, torch.bfloat16, [100, 30]) | {"plan": torch.tensor([0, 2, 3]).int()}


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_head_dim(lambda head_dim, dtype: make(head_dim, 8, 2, 16, dtype, [100]))


# one request, up to 32 and more than 32, each with merges of few or many parts: a program alone looks for no others
MOST_VARIANTS = {"_attention_kernel": 3, "_merge_kernel": 4}


def size_sweep():
    for batch_size, length in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024, 4000)):
        yield make(16, 4, 1, 16, torch.float16, [length] * batch_size)


def wrong_calls():
    half = {"v_cache": torch.zeros(9, 16, 2, 64).half()}
    yield make(64, 2, 2, 16, torch.float32, [40, 33]) | half, "v_cache must have dtype float32, got float16"


@pytest.mark.cross
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    form = "csr" if SHAPES.index(shape) % 2 else "block_table"
    check(make(*shape, form=form, device=device), str(shape))


@pytest.mark.parametrize("multiprocessors", [1, 3, 5, 264])
def test_chunks(multiprocessors, device, monkeypatch):
    """Requests that begin, end and are whole in a chunk, fill it, or have no keys; of few and of many blocks."""
    retune(monkeypatch, TUNING, programs=(1, 1))
    assume_multiprocessors(monkeypatch, multiprocessors)
    check(make(64, 2, 1, 16, torch.float32, [700, 0, 1, 128], device=device), "chunks")


@pytest.mark.parametrize("lengths", [[2600, *[9, 300, 0, 700] * 5], [40] * 30, [300, 2600] * 2], ids=len)
def test_gaps_before_short_requests(lengths, device, monkeypatch):
    """Chunks of many short requests, and chunks that end in a gap; found in one look at the requests, or in several."""
    assume_multiprocessors(monkeypatch, 3)
    check(make(64, 2, 1, 16, torch.float32, lengths, device=device), "gaps")
    check(make(64, 2, 1, 16, torch.float32, [*lengths, *[1] * 110], device=device), "more requests")


def num_joined(values: dict) -> int:
    """How many KV heads the launcher reads as one."""
    launches = []
    with intercept(lambda *launch: launches.append(launch)):
        eagle_kernels.raw.gqa_decode(**values)
    return launches[0][3]["SHAPE"].JOINED


@pytest.mark.parametrize(
    ("shape", "joined"),
    [((64, 8, 2), 2), ((64, 9, 2), 1), ((64, 1, 3), 1), ((32, 4, 8), 4), ((32, 8, 6), 2), ((16, 1, 8), 8)], ids=str,
)  # fmt: skip
def test_narrow_heads_are_read_as_one(shape, joined, device, monkeypatch):
    """Up to 128 columns and 16 rows, with all that differs between heads."""
    assume_multiprocessors(monkeypatch, 3)
    values = make(*shape, 16, torch.float16, [300, 0, 1, 128], device=device)
    assert num_joined(values) == joined
    check(values, "alike")
    check(values | {"sinks": torch.randn(shape[1] * shape[2], device=device), "window": 70}, "sinks")
    same = with_float8(values, k_scale=[0.5], v_scale=[2.0])
    assert num_joined(same) == joined
    check(same, "float8")
    scales = {name: torch.rand(shape[2], device=device) + 0.5 for name in ("k_scale", "v_scale")}
    assert num_joined(same | scales) == 1
    odd = {}  # pages that begin an odd number of heads apart
    for name in ("k_cache", "v_cache"):
        rows = values[name].flatten(1, 2)
        odd[name] = torch.cat([rows, rows[:, :1]], 1)[:, :-1].unflatten(1, values[name].shape[1:3])
    for case, apart in (("packed", with_pools(values, "pthw")), ("odd pages", values | odd)):
        assert num_joined(apart) == 1
        check(apart, case)


@pytest.mark.parametrize("head_dim", [136, 256, 384, 512])
def test_parts_of_wide_heads(head_dim, device, monkeypatch):
    """Merged some columns at a time."""
    assume_multiprocessors(monkeypatch, 5)
    check(make(head_dim, 2, 1, 16, torch.float32, [700, 0, 1, 128], device=device), str(head_dim))


@pytest.mark.cross
@pytest.mark.parametrize("window", [100, 1, 16, 17, 700, 2000])
def test_window(window, device):
    """Slots before the window may hold anything, and their pages may be gone."""
    values = make(32, 2, 1, 16, torch.float32, [700, 0, 1, 130, 64], device=device)
    for request, length in enumerate(values["seq_lens"].tolist()):
        values["block_table"][request, : max(length - window, 0) // 16] = -1
    check(values | {"window": window}, f"window {window}")


@pytest.mark.parametrize("soft_cap", [5.0, 50.0])
def test_soft_cap(soft_cap, device):
    values = make(64, 4, 2, 16, torch.float32, [300, 7], device=device)
    values["query"] *= 20
    check(values | {"soft_cap": soft_cap}, f"soft cap {soft_cap}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sinks(dtype, device):
    """A request without keys has the sink's lse and output 0."""
    values = make(32, 3, 2, 16, dtype, [400, 5, 0], device=device)
    values["sinks"] = torch.linspace(-2, 8, 6, device=device).to(dtype)
    result = check(values, "sinks")
    assert (result.output[2] == 0).all()
    assert_close("gqa_decode", "no keys", "lse", result.lse[2], values["sinks"].float())


@pytest.mark.cross
@pytest.mark.parametrize("num_scales", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["float8", "int8"])
def test_float8_cache(dtype, num_scales, device):
    values = make(64, 4, 2, 16, torch.bfloat16 if dtype else torch.float16, [300, 17], device=device)
    values = with_float8(values, dtype, k_scale=[0.5, 1.75][:num_scales], v_scale=[1.25, 0.25][:num_scales])
    check(values, f"float8, {num_scales} scales")
    values["k_scale"][0] = 0.0  # of a head whose keys are all 0
    check(values, f"float8, {num_scales} scales, one of them 0")


def test_all_at_once(device):
    values = make(80, 5, 2, 32, torch.float16, [333, 40, 0], form="csr", device=device)
    values |= {"window": 200, "soft_cap": 20.0, "sm_scale": 0.2, "sinks": torch.randn(10, device=device).half()}
    check(values, "all at once")


@pytest.mark.cross
@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("batch_size", [2, 1, 9])
@pytest.mark.parametrize("form", ["block_table", "csr"])
@pytest.mark.parametrize(("length", "window"), [(300, None), (900, 700)])
def test_deterministic_bits_do_not_depend_on_the_batch(batch_size, form, length, window, device, monkeypatch):
    """Neighbours of any length, a wider page table and a place of its own: the same bits.

    With so few programs that other calls cut keys by the lengths of the batch, and few shares that are merged at once.
    """
    retune(monkeypatch, TUNING, programs=(1, 1))
    monkeypatch.setattr(ordered, "MERGED_SHARES", 4)
    assume_multiprocessors(monkeypatch, 6)
    extra = {"sinks": torch.randn(4, device=device), "deterministic": True, "window": window}
    alone = make(32, 2, 2, 16, torch.float32, [length], device=device)
    expected = eagle_kernels.raw.gqa_decode(**alone, **extra)
    lengths = [900, 0, 7, 128, 64, 300, 511, 1][: batch_size - 1]
    many = make(32, 2, 2, 16, torch.float32, [*lengths, length], form=form, device=device)
    many["query"][-1] = alone["query"][0]
    pages = alone["block_table"][0].long()
    if form == "block_table":
        own = many["block_table"][-1, : len(pages)].long()
    else:
        own = many["kv_indices"][many["kv_indptr"][-2] : many["kv_indptr"][-1]].long()
    for name in ("k_cache", "v_cache"):
        many[name][own] = alone[name][pages]
    result = eagle_kernels.raw.gqa_decode(**many, **extra)
    assert_equal("gqa_decode", "in a batch", "output", result.output[-1], expected.output[0])
    assert_equal("gqa_decode", "in a batch", "lse", result.lse[-1], expected.lse[0])
    check(many | extra, "deterministic")
    if batch_size > 1:
        extra["deterministic"] = False
        result = [eagle_kernels.raw.gqa_decode(**values, **extra).output for values in (alone, many)]
        assert not torch.equal(result[0][0], result[1][-1])


@pytest.mark.slow
def test_more_shares_than_an_axis_of_a_grid_has_programs(device, monkeypatch):
    """Deterministic calls of 2048 requests of long tables; here the limit is lower."""
    values = make(32, 1, 1, 16, torch.float16, [300, 0, 129, 700], max_pages=260, device=device)
    values["deterministic"] = True
    expected = check(values)
    monkeypatch.setattr(ordered, "MAX_PROGRAMS", 37)
    grids = []
    with intercept(lambda op, kernel, grid, arguments: grids.append(grid)):
        eagle_kernels.raw.gqa_decode(**values)
    assert 1 < max(grids[0][1:]) <= 37 and min(grids[0][1:]) > 1
    result = eagle_kernels.raw.gqa_decode(**values)
    assert_equal("gqa_decode", "two axes", "output", result.output, expected.output)


def test_both_page_tables_agree(device):
    results = []
    for form in ("block_table", "csr"):
        torch.manual_seed(1)
        values = make(32, 4, 1, 16, torch.float32, [40, 0, 33], form=form, device=device)
        results.append(eagle_kernels.raw.gqa_decode(**values))
    assert_equal("gqa_decode", "forms", "output", *(result.output for result in results))
    assert_equal("gqa_decode", "forms", "lse", *(result.lse for result in results))


def test_dead_rows_and_bad_page_ids(device):
    """Rows without keys are 0 and -inf, ids outside the pool are passed over, and the others keep their bits."""
    values = make(64, 4, 1, 16, torch.float32, [40, 0, 33, 20], device=device)
    alone = eagle_kernels.raw.gqa_decode(**values)
    values["seq_lens"][1] = 32  # its pages are -1
    values["block_table"][3] = 2**30
    values["seq_lens"][2] = -5
    result = check(values, "dead rows")
    for row in (1, 2, 3):
        assert (result.output[row] == 0).all() and (result.lse[row] == float("-inf")).all()
    assert torch.equal(result.output[0], alone.output[0])
    values["seq_lens"][0] = 2**30  # past the table: only what the table holds
    values["block_table"][0, 1] = -1
    values["k_cache"].nan_to_num_(1.0)
    values["v_cache"].nan_to_num_(1.0)
    check(values, "lengths past the table")


def test_malformed_csr(device):
    values = make(64, 2, 1, 4, torch.float32, [8, 8, 8], form="csr", device=device)
    values["kv_indptr"].copy_(torch.tensor([2, -7, 4, 2**30]))
    values["last_page_len"].copy_(torch.tensor([3, 100, -9]))
    check(values, "malformed indptr")


@pytest.mark.cross
@pytest.mark.parametrize("max_programs", [ordered.MAX_PROGRAMS, 5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_requests_that_share_pages_of_a_csr_table(deterministic, max_programs, device, monkeypatch):
    """Malformed, and more shares than the pages have room for: what lies behind the partial results is not read, nor
    written by programs of a last, incomplete layer of the grid."""
    monkeypatch.setattr(ordered, "MAX_PROGRAMS", max_programs)
    values = make(32, 2, 1, 16, torch.float32, [700, 0, 0, 0, 0], form="csr", device=device)
    count = int(values["kv_indptr"][1])
    values["last_page_len"].fill_(12)
    expected = eagle_kernels.raw.gqa_decode(**values, deterministic=deterministic)
    values["kv_indptr"].copy_(torch.tensor([0, count, 0, count, 0, count]))
    empty = torch.empty

    def among_poison(shape, **options):
        size = torch.Size(shape).numel()
        poison = float("nan") if options["dtype"].is_floating_point else -(2**30)
        return empty(size + 2**17, **options).fill_(poison)[2**16 : size + 2**16].view(shape)

    monkeypatch.setattr(torch, "empty", among_poison)
    with assert_in_bounds():
        result = eagle_kernels.raw.gqa_decode(**values, deterministic=deterministic)
    assert_close("gqa_decode", "first", "output", result.output[0], expected.output[0])


def test_nan_stays_in_its_request(device):
    values = make(64, 2, 1, 16, torch.float32, [20, 20], device=device)
    before = eagle_kernels.raw.gqa_decode(**values)
    values["query"][0] = float("nan")
    after = eagle_kernels.raw.gqa_decode(**values)
    assert after.output[0].isnan().all() and after.lse[0].isnan().all()
    assert torch.equal(before.output[1], after.output[1])


@pytest.mark.cross
@pytest.mark.parametrize("form", ["block_table", "csr"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_page_ids_that_int32_does_not_hold(page_size, form, device):
    """Such a page is outside the pool like -1, not the page that its lower half names."""
    values = make(64, 2, 2, page_size, torch.float32, [300], form=form, index_dtype=torch.int64, device=device)
    table = values["block_table"][0] if form == "block_table" else values["kv_indices"]
    page = table[1].item()
    table[1] = -1
    expected = eagle_kernels.raw.gqa_decode(**values)
    table[1] = page + 2**32
    result = eagle_kernels.raw.gqa_decode(**values)
    assert_equal("gqa_decode", f"{page_size}", "output", result.output, expected.output)


def test_slots_are_counted_in_int32(device):
    """With room behind them for the slots of a draft block."""
    values = make(16, 1, 1, 256, torch.float16, [300], device=device)
    values["block_table"] = torch.zeros(1, 2**23 - 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"block_table must name at most 2\^31 - 1024 slots, got 2147483392"):
        eagle_kernels.raw.gqa_decode(**values)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_rows_are_counted_in_uint32(name):
    """From the first to the last one of a pool, whatever lies between its pages."""
    values = dict.fromkeys(inspect.signature(eagle_kernels.raw.gqa_decode).parameters)
    values |= make(16, 1, 1, 16, torch.float16, [17])
    values = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    for gap, is_refused in ((2**30 - 5, False), (2**30 - 4, True)):
        strides = (16 * gap, 16, 16, 1)
        values[name] = torch.empty_strided(values[name].shape, strides, dtype=torch.float16, device="meta")
        if is_refused:
            with pytest.raises(ValueError, match=name + r" must span less than 2\^32 rows of D = 16 elements"):
                contract(values)
        else:
            contract(values)


@pytest.mark.gpu
def test_pools_past_two_billion_elements(device):
    """Page strides beyond 2^31 elements reach the pages they name."""
    values = make(128, 4, 1, 16, torch.float16, [48], device=device)
    far = torch.zeros(2**20, 2, 16, 1, 128, dtype=torch.float16, device=device)
    near = values["block_table"][0].long()
    last = torch.arange(far.shape[0] - len(near), far.shape[0], device=device)
    far[last, 0], far[last, 1] = values["k_cache"][near], values["v_cache"][near]
    moved = values | {"k_cache": far[:, 0], "v_cache": far[:, 1], "block_table": last[None].int()}
    result, expected = eagle_kernels.raw.gqa_decode(**moved), eagle_kernels.raw.gqa_decode(**values)
    assert_equal("gqa_decode", "far pages", "output", result.output, expected.output)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_requests(deterministic, device):
    """131072 slots beside short and empty requests."""
    values = make(128, 4, 2, 16, torch.bfloat16, [1 << 17, 5, 0, (1 << 17) - 1], device=device)
    check(values | {"deterministic": deterministic}, "131072 slots")
    check(values | {"deterministic": deterministic, "window": 70000}, "131072 slots, window")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_bits_in_a_batch_of_64(dtype, device):
    lengths = torch.randint(0, 5000, (64,)).tolist()
    lengths[17] = 3333
    many = make(128, 4, 2, 16, dtype, lengths, device=device)
    result = eagle_kernels.raw.gqa_decode(**many, deterministic=True)
    alone = many | {name: many[name][17:18] for name in ("query", "block_table", "seq_lens")}
    alone["block_table"] = alone["block_table"][:, : -(-3333 // 16)].contiguous()
    expected = eagle_kernels.raw.gqa_decode(**alone, deterministic=True)
    assert_equal("gqa_decode", "one of 64", "output", result.output[17], expected.output[0])
    assert_equal("gqa_decode", "one of 64", "lse", result.lse[17], expected.lse[0])


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256, 320, 512])
def test_full_cross(head_dim, dtype, window, device):
    pages = itertools.cycle([1, 16, 32, 64, 128, 256])
    for group_size in (1, 2, 3, 5, 6, 7, 8, 16):
        lengths = torch.randint(0, 1500, (5,)).tolist() + [0, 1, 64, 128]
        form = "csr" if group_size % 2 else "block_table"
        values = make(head_dim, group_size, 2, next(pages), dtype, lengths, form=form, device=device)
        check(values | {"window": window}, f"{head_dim} {group_size} {dtype} {window}")
