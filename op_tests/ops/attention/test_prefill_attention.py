"""prefill_attention against float64: prompts and chunks, paged and not, windows, poisoned pools and neighbours."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.attention.prefill_attention import TUNING
from eagle_kernels.reference.ops.attention.prefill_attention import prefill_attention as reference
from eagle_kernels.runtime.launch import intercept
from op_tests.harness import assert_close, assert_equal, assert_in_bounds, check_close, retune
from op_tests.harness.cases import module_of_op
from op_tests.harness.pools import with_pools

from .cases import EIGHT_BITS, WITHOUT_FLOAT8, of_every_dtype_and_head_dim, with_float8
from .cases import make_prompts as make

# (queries, keys before them, head_dim, group, kv heads, page size or None, dtype)
SHAPES = [
    ([1, 3, 40], [0, 0, 0], 16, 1, 2, None, torch.float32),
    ([33, 64], [31, 0], 64, 2, 1, 16, torch.float16),
    ([65, 0, 7], [0, 5, 100], 80, 3, 1, 1, torch.float32),
    ([130], [0], 96, 5, 1, None, torch.float16),
    ([9, 1], [120, 63], 112, 7, 1, 128, torch.float32),
    ([70, 31], [3, 64], 128, 4, 2, 64, torch.float16),
    ([20], [40], 128, 8, 1, None, torch.float32),
    ([12], [30], 192, 16, 1, 32, torch.float16),
    ([50], [10], 256, 6, 1, 256, torch.float16),
    ([9], [12], 512, 4, 1, 16, torch.float16),
    ([7], [3], 320, 2, 1, None, torch.float32),
    ([20, 3], [0, 9], 8, 2, 4, 16, torch.float16),
    ([18], [3], 160, 2, 1, None, torch.float16),
]


check = functools.partial(check_close, "attention.prefill_attention", fields=("output", "lse"))
NOT_SUPPORTED = WITHOUT_FLOAT8


def ahead_of_time_cases():
    for head_dim, dtype in ((80, torch.float16), (96, torch.bfloat16), (112, torch.float16), (128, torch.bfloat16),
                            (128, torch.float32), (192, torch.bfloat16), (512, torch.bfloat16)):  # fmt: skip
        yield f"D={head_dim} {dtype}", make([300], [0], head_dim, 4, 2, None, dtype)
    yield "D=64 float16 paged", make([100], [40], 64, 4, 2, 16, torch.float16)
    for head_dim in (128, 256):
        yield f"described D={head_dim}", make([1100], [0], head_dim, 4, 2, None, torch.bfloat16)
    yield "described pages", make([5120], [40], 128, 4, 2, 64, torch.float16)
    yield "packed", with_pools(make([100], [40], 128, 4, 2, 16, torch.float16), "pthw")
    everything = make([100], [40], 256, 4, 1, 64, torch.float16, form="csr")
    everything |= {"window": 50, "soft_cap": 30.0, "sinks": torch.zeros(4)}
    yield "all that changes logits", everything
    everything["query"] = everything["query"].bfloat16()
    for dtype in EIGHT_BITS:
        yield str(dtype), with_float8(everything, dtype)


def order_case():
    return make([70, 3], [0, 30], 16, 2, 2, 16, torch.float32)


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_head_dim(lambda head_dim, dtype: make([300], [40], head_dim, 4, 2, 16, dtype))


def size_sweep():
    for batch_size, count in itertools.product((1, 2, 3, 16, 17), (1, 3, 5, 9, 32, 100, 1024, 4000)):
        yield make([count] * batch_size, [0] * batch_size, 16, 4, 1, None, torch.float16)


def wrong_calls():
    rule = "soft_cap must be a positive finite number or None, got 0.0"
    yield make([20, 5], [0, 0], 32, 2, 2, None, torch.float32) | {"soft_cap": 0.0}, rule


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    form = "csr" if SHAPES.index(shape) % 2 else "block_table"
    check(make(*shape, form=form, device=device), str(shape))


@pytest.fixture
def described(monkeypatch):
    """Lets descriptors read the keys of all prompts; returns whether they do in a call."""
    retune(monkeypatch, TUNING, described={"min_rows": 64, "max_rows": 64, "num_warps": 4})
    module = module_of_op("attention.prefill_attention")
    monkeypatch.setattr(module, "DESCRIBED_TOKENS", 1)
    monkeypatch.setattr(module, "PAGED_FACTOR", 1)

    def is_described(values: dict) -> bool:
        launches = []
        with intercept(lambda *launch: launches.append(launch)):
            eagle_kernels.raw.prefill_attention(**values)
        return launches[0][3]["key_tiles"] is not None

    return is_described


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, None), (256, 64), (128, 128), (256, None)])
@pytest.mark.parametrize(
    "shape", [([150, 70, 0, 3], [0] * 4), ([9, 130], [130, 64]), ([64, 65], [64, 191]), ([1], [63])], ids=str
)
def test_descriptors_read_what_all_rows_see(shape, page_size, head_dim, described, device):
    values = make(*shape, head_dim, 2, 2, page_size, torch.float16, device=device)
    assert described(values)
    with assert_in_bounds():
        check(values, "described")
    check(values | {"is_causal": False, "sinks": torch.randn(4, device=device), "soft_cap": 5.0}, "not causal")


def test_pages_that_are_none_are_zeros_to_descriptors(described, device):
    """As they are to pointers."""
    values = make([5], [250], 128, 1, 1, 64, torch.float16, device=device)
    values["block_table"][0, :3] = torch.tensor([-1, 2**31 - 1, len(values["k_cache"])], device=device)
    assert described(values)
    got = eagle_kernels.raw.prefill_attention(**values)
    expected = eagle_kernels.raw.prefill_attention(**values | {"window": 2**31 - 1})  # by pointers
    for field in got._fields:
        assert_close("prefill_attention", "no pages", field, getattr(got, field), getattr(expected, field))


@pytest.mark.parametrize("layout", ["ptwh", "pthw", "phtw"])
def test_layouts_that_descriptors_read(layout, described, device):
    values = with_pools(make([70, 31], [3, 64], 128, 2, 2, 64, torch.float16, device=device), layout)
    assert described(values) == (layout != "phtw") and not described(with_float8(values))
    check(values, layout)


@pytest.mark.parametrize(
    "changed", [{"page_size": 16}, {"dtype": torch.float32}, {"head_dim": 64}, {"head_dim": 160}], ids=str
)
def test_what_descriptors_do_not_read(changed, described, device):
    sizes = {"head_dim": 128, "group_size": 2, "num_kv_heads": 1, "page_size": 64, "dtype": torch.float16} | changed
    values = make([70, 31], [3, 64], **sizes, device=device)
    assert not described(values)
    check(values, "pointers")


@pytest.mark.parametrize("window", [1, 16, 50, 64, 65, 500])
@pytest.mark.parametrize("page_size", [None, 16])
def test_window(window, page_size, device):
    values = make([70, 5, 33], [0, 90, 130], 32, 2, 1, page_size, torch.float32, device=device)
    check(values | {"window": window}, f"window {window}")


def test_every_key_is_seen_without_causality(device):
    values = make([7, 70], [0, 20], 32, 2, 2, None, torch.float32, device=device)
    check(values | {"is_causal": False}, "not causal")
    check(values | {"is_causal": False, "window": 40}, "not causal, window")


def test_chunks_are_the_prompt(device):
    """A prompt in three chunks, each after what is cached, gives what the whole prompt gives."""
    values = make([90], [0], 32, 4, 1, 16, torch.float32, device=device)
    whole = eagle_kernels.raw.prefill_attention(**values)
    for first, last in ((0, 20), (20, 64), (64, 90)):
        chunk = values | {"query": values["query"][first:last], "max_query": last - first}
        chunk["qo_indptr"] = torch.tensor([0, last - first], device=device)
        chunk["seq_lens"] = torch.tensor([last], device=device)
        result = eagle_kernels.raw.prefill_attention(**chunk)
        assert_close("prefill_attention", f"chunk {first}", "output", result.output, whole.output[first:last])


def test_soft_cap_sinks_and_scale(device):
    values = make([40, 9], [3, 0], 64, 3, 2, None, torch.float16, device=device)
    check(values | {"soft_cap": 8.0, "sinks": torch.randn(6, device=device), "sm_scale": 0.3}, "soft cap, sinks")


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["float8", "int8"])
def test_float8_cache(dtype, device):
    values = make([40, 9], [30, 0], 64, 4, 2, 16, torch.float16, device=device)
    check(with_float8(values, dtype, k_scale=[0.5, 1.5], v_scale=[2.0, 0.75]), "8 bits")


def test_more_queries_than_keys(device):
    """The first queries see nothing."""
    values = make([9, 4], [0, 0], 32, 2, 1, None, torch.float32, device=device)
    values["key_indptr"] = torch.tensor([0, 4, 8], device=device)
    result = check(values, "few keys")
    assert (result.output[:5] == 0).all() and (result.lse[:5] == float("-inf")).all()
    values = make([70], [0], 32, 2, 1, None, torch.float32, device=device)
    values["key_indptr"] = torch.tensor([0, 9], device=device)
    for window in (4, 2**31 - 1):
        check(values | {"window": window}, f"few keys, window {window}")


def test_a_request_does_not_look_at_others(device):
    """NaN in one request's queries, keys and values stays there, and bits do not depend on the batch."""
    values = make([20, 33, 5], [0, 0, 0], 32, 2, 1, None, torch.float32, device=device)
    before = eagle_kernels.raw.prefill_attention(**values)
    for name in ("query", "key", "value"):
        values[name][20:53] = float("nan")
    after = eagle_kernels.raw.prefill_attention(**values)
    for rows in (slice(0, 20), slice(53, 58)):
        assert_equal("prefill_attention", "neighbours", "output", after.output[rows], before.output[rows])
    alone = make([5], [0], 32, 2, 1, None, torch.float32, device=device)
    alone |= {name: values[name][53:] for name in ("query", "key", "value")}
    result = eagle_kernels.raw.prefill_attention(**alone)
    assert_equal("prefill_attention", "alone", "output", result.output, before.output[53:])


@pytest.mark.parametrize("page_size", [None, 16])
def test_queries_beyond_max_query(page_size, device):
    """The queries that are attended are what they are where all are."""
    values = make([20, 3], [10, 0], 32, 2, 1, page_size, torch.float32, device=device)
    whole = eagle_kernels.raw.prefill_attention(**values)
    result = eagle_kernels.raw.prefill_attention(**values | {"max_query": 7})
    expected = reference(**values | {"max_query": 7})
    for rows in (slice(0, 7), slice(20, 23)):
        assert_close("prefill_attention", "all", "output", result.output[rows], whole.output[rows])
        assert_close("prefill_attention", "reference", "output", result.output[rows], expected.output[rows])


@pytest.mark.cross
@pytest.mark.parametrize("page_size", [None, 16])
def test_many_requests(page_size, device):
    """More than a program looks at at once, some of them empty, with one and with several tiles of rows."""
    counts = [number * 37 % 41 for number in range(70)]
    counts[40:44] = [0, 0, 150, 0]
    check(make(counts, [0] * 35 + [3] * 35, 16, 2, 2, page_size, torch.float32, device=device), str(page_size))


def test_rows_of_no_request_are_not_written(device):
    values = make([6, 6], [0, 0], 32, 1, 1, None, torch.float32, device=device)
    values["qo_indptr"] = torch.tensor([0, 4, 9], device=device)
    values["key_indptr"] = values["qo_indptr"]
    out = eagle_kernels.raw.prefill_attention(**values)
    out.output.fill_(7.0)
    eagle_kernels.raw.prefill_attention(**values, out=out)
    assert (out.output[9:] == 7.0).all() and (out.output[:9] != 7.0).any()


@pytest.mark.cross
@pytest.mark.parametrize("row", [row for rows in TUNING.values() for row in rows], ids=lambda row: f"{row['max_rows']}")
def test_every_tuning_row(row, device, monkeypatch):
    """Tiles of many rows, and those of few."""
    retune(monkeypatch, TUNING, **(row | {"from_rows": 0}))
    for head_dim, page_size, extra in ((128, 16, {}), (64, None, {"window": 70}), (80, 1, {"soft_cap": 5.0})):
        values = make([90, 1, 33], [0, 70, 64], head_dim, 4, 2, page_size, torch.float16, device=device)
        check(values | extra, f"{head_dim}")


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_full_cross(window, head_dim, dtype, device):
    for group_size, page_size in ((1, None), (3, 16), (4, 64), (8, 256), (16, 1), (7, None)):
        counts = torch.randint(0, 700, (3,)).tolist() + [1, 64]
        before = torch.randint(0, 700, (4,)).tolist() + [0]
        values = make(counts, before, head_dim, group_size, 2, page_size, dtype, device=device) | {"window": window}
        check(values, f"{head_dim} {group_size} {page_size} {window}")
