"""write_kv against its reference, bit by bit, over whole pools: page sizes, rotation, 8-bit floats, dead slots."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.kv.write_kv import write_kv as reference
from eagle_kernels.runtime import launch, target
from op_tests.harness import assert_close, assert_equal, check_operation, to_device
from op_tests.harness.cases import copied, in_float64
from op_tests.harness.operation import as_bits
from op_tests.harness.pools import with_pools

from ..attention.cases import WITHOUT_FLOAT8
from ..nn.tables import make_tables

CACHES = ("k_cache", "v_cache")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
EIGHT_BITS = (FN, FNUZ, torch.int8)

# (page_size, query heads, KV heads, head_dim, dtype, dtype of the caches); page sizes need not be powers of two
SHAPES = [
    (1, 4, 2, 64, torch.float16, torch.float16),
    (16, 5, 1, 80, torch.float32, torch.float32),
    (64, 8, 8, 33, torch.float16, FN),
    (256, 2, 2, 128, torch.float32, FNUZ),
    (3, 32, 4, 96, torch.float16, torch.float16),
    (16, 9, 3, 256, torch.float32, FN),
    (16, 1, 1, 1, torch.float32, torch.float32),
    (1, 16, 1, 576, torch.float16, FNUZ),
    (16, 8, 4, 40, torch.float16, torch.int8),
    (4, 2, 2, 64, torch.float32, torch.int8),
]


def make(page_size, num_heads, num_kv_heads, head_dim, dtype, cache_dtype, *, slots=None, rotary_dim=None,
         table_dtype=None, has_query=True, has_scales=None, num_pages=None, index_dtype=torch.int64, is_strided=False,
         device="cpu", **options):  # fmt: skip
    """Random heads, and caches of random bits, NaN included. `slots` None: three scattered ones and one of -1.

    Skips the test on a GPU that has no such type as cache_dtype.
    """
    if cache_dtype in (FN, FNUZ) and not target.has_fp8(torch.device(device), cache_dtype):
        pytest.skip(f"{target.architecture(torch.device(device))} has no {cache_dtype}")
    if slots is None:
        num_pages = num_pages or max(3, -(-8 // page_size))
        slots = [*torch.randperm(num_pages * page_size)[:3].tolist(), -1]
    num_pages = num_pages or max(slots) // page_size + 2
    size = torch.empty(0, dtype=cache_dtype).element_size()
    bits = torch.randint(256, (num_pages, 2, page_size, num_kv_heads, head_dim * size), dtype=torch.uint8)
    pool = bits.to(device).view(cache_dtype)
    caches = (pool[:, 0], pool[:, 1]) if is_strided else (pool[:, 0].contiguous(), pool[:, 1].contiguous())
    values = {
        "key": torch.randn(len(slots), num_kv_heads, head_dim).to(dtype),
        "value": torch.randn(len(slots), num_kv_heads, head_dim).to(dtype),
        "slots": torch.tensor(slots, dtype=index_dtype),
    }
    rotary_dim = head_dim // 2 * 2 if rotary_dim is None else rotary_dim
    if rotary_dim:
        values["cos"], values["sin"] = make_tables(50, rotary_dim, table_dtype or dtype)
        values["positions"] = torch.randint(50, (len(slots),), dtype=index_dtype)
        if has_query:
            values["query"] = torch.randn(len(slots), num_heads, head_dim).to(dtype)
    if has_scales if has_scales is not None else cache_dtype in EIGHT_BITS:
        values["k_scale"] = torch.tensor(0.01)
        values["v_scale"] = 0.005 + torch.rand(num_kv_heads)
    return to_device(values, device) | dict(zip(CACHES, caches)) | options


def check(values, case=""):
    return check_operation("kv.write_kv", values, case=case)[0]


NOT_SUPPORTED = {(f"{dtype}{scales}", name) for dtype, name in WITHOUT_FLOAT8 for scales in ("", " without scales")}


def ahead_of_time_cases():
    shape = (16, 32, 8, 128)
    yield "bfloat16", make(*shape, torch.bfloat16, torch.bfloat16)
    yield "float16 interleaved", make(*shape, torch.float16, torch.float16, is_interleaved=True, rotary_dim=64)
    yield "packed", with_pools(make(*shape, torch.float16, torch.float16), "pthw")
    yield "float32 without tables", make(1, 4, 2, 80, torch.float32, torch.float32, rotary_dim=0)
    for dtype in EIGHT_BITS:
        yield str(dtype), make(*shape, torch.bfloat16, dtype, table_dtype=torch.float32)
        yield f"{dtype} without scales", make(*shape, torch.bfloat16, dtype, has_scales=False)


def order_case():
    return make(4, 9, 3, 64, torch.float32, torch.float32)


def size_sweep():
    for num_tokens, num_pages in itertools.product((1, 2, 3, 16, 17, 64, 257), (300, 7, 4096)):
        shape = (1, 4, 2, 16, torch.float16, torch.float16)
        yield make(*shape, slots=[0] * num_tokens, num_pages=num_pages)
        yield make(*shape, slots=[0] * num_tokens, num_pages=5, is_strided=True)


def wrong_calls():
    values = make(*SMALL, num_pages=3)
    other = {"k_cache": torch.zeros(3, 16, 2, 64).to(torch.float8_e5m2)}
    yield values | other, "k_cache must have dtype .* got float8_e5m2"
    yield values | {"slots": torch.zeros(2, 3).long()}, "slots must have a number for each of T = 4 tokens, got .*2, 3"
    yield values | {"positions": torch.zeros(1, 2, 2).long()}, r"positions must have shape \[T\], got"


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, is_interleaved, device):
    index = SHAPES.index(shape)
    options = {"table_dtype": torch.float32 if index % 3 == 0 else None, "has_query": index % 4 != 1}
    index_dtype = (torch.int64, torch.int32)[index % 2]
    values = make(*shape, **options, index_dtype=index_dtype, is_interleaved=is_interleaved, device=device)
    check(values, f"{shape} {is_interleaved}")


@pytest.mark.parametrize("cache_dtype", [torch.float16, FN], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_page_sizes(page_size, cache_dtype, device):
    """First and last slots of the pool and of pages in it; half of each head turned."""
    slots = sorted({0, page_size - 1, page_size, 2 * page_size, 3 * page_size - 1, 5 * page_size - 1})
    shape = (page_size, 2, 2, 16, torch.float16, cache_dtype)
    check(make(*shape, slots=slots, rotary_dim=8, num_pages=5, device=device), f"{page_size} {cache_dtype}")


def test_bfloat16(device):
    """Without tables elements keep their bits, NaN too; turned, the interpreter cuts off where a GPU rounds."""
    values = make(16, 4, 2, 64, torch.bfloat16, torch.bfloat16, rotary_dim=0, device=device)
    values["key"].view(torch.int16)[:, 0].random_(-(2**15), 2**15)
    check(values, "bfloat16")
    values = make(16, 4, 2, 64, torch.bfloat16, torch.bfloat16, rotary_dim=32, device=device)
    if values["key"].is_cuda:
        check(values, "bfloat16 turned")
    expected = {name: value for name, value in in_float64(values).items() if value is not None}
    result, want = eagle_kernels.raw.write_kv(**values), reference(**expected)
    assert_close("write_kv", "bfloat16 turned", "output", result, want)
    is_written = values["slots"] >= 0
    for name in CACHES:
        rows, want = (v[name].flatten(0, 1)[values["slots"][is_written]] for v in (values, expected))
        assert_close("write_kv", "bfloat16 turned", name, rows, want)


def test_within_twice_pytorch_s_error(device):
    for dtype, table_dtype in ((torch.float32, None), (torch.float16, None), (torch.float16, torch.float32)):
        values = make(16, 4, 2, 64, dtype, dtype, table_dtype=table_dtype, device=device)
        wide, same = in_float64(values), {name: value.clone() for name, value in values.items()}
        results = [function(**v) for function, v in ((eagle_kernels.raw.write_kv, values), (reference, wide),
                                                     (reference, same))]  # fmt: skip
        assert_close("write_kv", str(dtype), "output", *results)
        slots = values["slots"][values["slots"] >= 0]
        for name in CACHES:
            rows = [v[name].flatten(0, 1)[slots] for v in (values, wide, same)]
            assert_close("write_kv", str(dtype), name, *rows)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float16, FN], ids=str)
def test_is_rope_and_then_a_write(cache_dtype, is_interleaved, device):
    values = make(16, 4, 2, 80, torch.float16, cache_dtype, rotary_dim=32, is_interleaved=is_interleaved, device=device)
    apart = {name: values[name].clone() for name in CACHES}
    result = eagle_kernels.raw.write_kv(**values)
    tables = {name: values.pop(name) for name in ("positions", "cos", "sin", "is_interleaved")}
    turned = eagle_kernels.raw.rope(values.pop("query"), values.pop("key"), **tables)
    eagle_kernels.raw.write_kv(**values | apart, key=turned.key)
    assert_equal("write_kv", "apart", "query", result, turned.query)
    for name in CACHES:
        assert_equal("write_kv", "apart", name, as_bits(values[name]), as_bits(apart[name]))


def test_slots_and_positions_of_rows_of_tokens(device):
    """[B, T / B] with any strides: a part of a table, and one number for all tokens of a row."""
    values = make(16, 4, 2, 32, torch.float16, torch.float16, slots=[3, 40, -1, 17, 2, 33], device=device)
    for dtype in (torch.int32, torch.int64):
        wide = torch.full((2, 7), 5, dtype=dtype, device=device)
        wide[:, 2:5] = values["slots"].view(2, 3)
        place = torch.tensor([[11], [7]], dtype=dtype, device=device)
        rows = {"slots": wide[:, 2:5], "positions": place.expand(2, 3)}
        result = check(values | rows, f"rows {dtype}")
        flat = {"slots": values["slots"].clone(), "positions": place.repeat_interleave(3)}
        assert_equal("write_kv", "rows", "output", result, check(values | flat, "flat"))
        check(values | {"slots": wide[:, 2:5], "positions": values["positions"]}, "slots alone")
        check(values | {"slots": wide[:, 2:5].t().contiguous().t()}, "columns")


def test_the_query_in_place(device):
    values = make(16, 6, 2, 64, torch.float16, torch.float16, device=device)
    fused = torch.randn(4, 10, 64, device=device).half()
    values |= {"query": fused[:, :6], "key": fused[:, 6:8], "value": fused[:, 8:]}
    rest = fused[:, 6:].clone()
    expected = copied(values)
    query = check(expected)
    assert eagle_kernels.raw.write_kv(**values, out=values["query"]) is values["query"]
    assert torch.equal(values["query"], query) and torch.equal(fused[:, 6:], rest)
    for name in CACHES:
        assert_equal("write_kv", "in place", name, as_bits(values[name]), as_bits(expected[name]))


DEAD = [-1, -7, 48, 49, 2**31 - 1]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, FN], ids=str)
def test_dead_slots_are_not_written(cache_dtype, index_dtype, device):
    """Live rows keep the bits that they have without the dead ones."""
    dead = DEAD + ([2**40, -(2**40)] if index_dtype == torch.int64 else [])
    shape = (16, 2, 2, 16, torch.float32, cache_dtype)
    values = make(*shape, slots=[5, *dead, 33], num_pages=3, index_dtype=index_dtype, device=device)
    check(values, "dead slots")
    live = [0, -1]
    alone = {name: values[name].clone() for name in CACHES}
    alone |= {name: values[name][live] for name in ("key", "value", "slots", "query", "positions")}
    result = eagle_kernels.raw.write_kv(**values | alone)
    assert_equal("write_kv", "alone", "output", result, eagle_kernels.raw.write_kv(**values)[live])
    for name in CACHES:
        assert_equal("write_kv", "alone", name, as_bits(alone[name]), as_bits(values[name]))


def test_positions_outside_the_tables(device):
    values = make(16, 2, 2, 16, torch.float32, torch.float32, slots=[1, 2, 3, 4], device=device)
    values["positions"][1:] = torch.tensor([-1, 50, 2**40])
    check(values, "positions")
    assert torch.equal(values["k_cache"][0, 2:5], values["key"][1:])


def test_nothing_to_write(device):
    for slots in ([], [-1, -1]):
        values = make(16, 2, 2, 16, torch.float16, torch.float16, slots=slots, num_pages=2, device=device)
        assert check(values, "nothing").shape == (len(slots), 2, 16)
    values = make(16, 2, 2, 16, torch.float16, FN, slots=[0, 1], num_pages=1, device=device)
    empty = {name: values[name][:0] for name in CACHES}
    check(values | empty, "a pool of no pages")


def every_value():
    """All values of fp16; for both kinds of 8-bit floats all values, all middles between two, and their neighbours."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    edges = []
    for dtype in (FN, FNUZ):
        known = torch.arange(256).to(torch.uint8).view(dtype).float()
        known = known[known.isfinite()].sort().values
        edges += [known, (known[1:] + known[:-1]) / 2]
    edges = torch.cat(edges)
    for _ in range(2):
        edges = torch.cat((edges, edges.nextafter(torch.tensor(1e9)), edges.nextafter(torch.tensor(-1e9))))
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])
    values = torch.cat((halves, edges, special))
    return torch.nn.functional.pad(values, (0, -len(values) % 1024)).view(-1, 1, 1024)


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_every_8_bit_float_is_rounded_as_by_pytorch(dtype, device):
    """Nearest, ties to even, limited to the largest value; NaN stays NaN, whatever its sign."""
    if not target.has_fp8(device, dtype):
        pytest.skip(f"{target.architecture(device)} has no {dtype}")
    key = every_value().to(device)
    caches = [torch.empty(len(key), 1, 1, 1024, dtype=dtype, device=device) for _ in range(2)]
    eagle_kernels.raw.write_kv(key, key, *caches, torch.arange(len(key), device=device))
    largest = torch.finfo(dtype).max
    expected = key.clamp(-largest, largest).to(dtype).view(torch.uint8)
    expected[key.isnan()] = 0
    for cache in caches:
        bits = as_bits(cache).view(expected.shape)
        assert (bits[key.isnan()].view(dtype).float().isnan()).all()
        assert_equal("write_kv", str(dtype), "bits", bits.masked_fill(key.isnan(), 0), expected)


@pytest.mark.cross
def test_int8_is_rounded_as_by_pytorch(device):
    """Nearest, ties to even, within -127..127; NaN becomes 0."""
    key = torch.cat((every_value(), (torch.arange(-1024, 1024) / 8).view(-1, 1, 1024))).to(device)
    caches = [torch.empty(len(key), 1, 1, 1024, dtype=torch.int8, device=device) for _ in range(2)]
    eagle_kernels.raw.write_kv(key, key, *caches, torch.arange(len(key), device=device))
    expected = key.nan_to_num(0.0, 127.0, -127.0).clamp(-127, 127).round().to(torch.int8)
    for cache in caches:
        assert_equal("write_kv", "int8", "numbers", cache.view(expected.shape), expected)


@pytest.mark.parametrize("form", ["scalar", "one", "per head", "none"])
def test_scales(form, device):
    """What is read back times its own scale is within half a step: 2^-4 of it, or 2^-10 of the scale."""
    values = make(16, 1, 3, 64, torch.float32, FN, rotary_dim=0, has_scales=False, slots=[3, 17, 20], device=device)
    scale = {"scalar": torch.tensor(0.02), "one": torch.tensor([0.02]), "per head": torch.tensor([0.01, 0.02, 0.04])}
    scale = scale[form].to(device) if form in scale else None
    factors = {"key": torch.ones(1, device=device) if scale is None else scale}
    factors["value"] = factors["key"] * (1 if scale is None else 4)
    check(values | ({} if scale is None else {"k_scale": factors["key"], "v_scale": factors["value"]}), form)
    for name, heads in (("k_cache", "key"), ("v_cache", "value")):
        factor = factors[heads]
        rows = values[name].float().flatten(0, 1)[values["slots"]] * factor.reshape(-1, 1)
        allowed = values[heads].abs() * 2.0**-4 + factor.reshape(-1, 1) * 2.0**-10
        assert ((rows - values[heads]).abs() <= allowed).all()


def test_one_scale_alone(device):
    values = make(16, 1, 2, 16, torch.float16, FN, rotary_dim=0, device=device)
    for name in ("k_scale", "v_scale"):
        check({key: value for key, value in values.items() if key != name}, f"without {name}")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950"])
def test_8_bit_floats_that_a_gpu_has_not_are_refused(architecture):
    """Before anything is compiled, in one line that says who has them; references know them everywhere."""
    has_fn = architecture in ("sm_89", "sm_90", "sm_120", "gfx950")
    for dtype, is_known in ((FN, has_fn), (FNUZ, architecture == "gfx942"), (torch.float16, True)):
        values, launched = make(16, 1, 2, 16, torch.float16, dtype), []
        with target.assume(architecture), launch.intercept(lambda *record, seen=launched: seen.append(record)):
            if is_known:
                eagle_kernels.raw.write_kv(**values)
            else:
                name = str(dtype).removeprefix("torch.")
                rule = rf"must have a dtype that {architecture} has \(float8_e4m3fn: sm_89 and up, gfx950; .*{name}"
                with pytest.raises(target.NotSupported, match=f"^eagle_kernels.write_kv: k_cache {rule}$"):
                    eagle_kernels.raw.write_kv(**values)
        assert len(launched) == is_known


def test_compiles_into_one_graph(device):
    """An op that changes two arguments and returns a tensor: torch.compile sees all of it."""
    values = make(4, 2, 1, 16, torch.float32, torch.float32, device=device)
    apart = values | {name: values[name].clone() for name in CACHES}
    expected = eagle_kernels.write_kv(**values) + 1
    compiled = torch.compile(lambda v: eagle_kernels.write_kv(**v) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(apart), expected)
    for name in CACHES:
        assert_equal("write_kv", "compiled", name, as_bits(apart[name]), as_bits(values[name]))


SMALL = (16, 4, 2, 64, torch.float32, torch.float32)


@pytest.mark.gpu
def test_pools_past_two_billion_elements(device):
    """Pages beyond 2^31 elements are reached, and the same rows of another pool are as they are there."""
    near = make(16, 4, 1, 128, torch.float16, torch.float16, slots=[3, 40], num_pages=3, device=device)
    num_pages = 2**20 + 3
    far = torch.zeros(num_pages, 2, 16, 1, 128, dtype=torch.float16, device=device)
    shift = (num_pages - 3) * 16
    moved = near | {"k_cache": far[:, 0], "v_cache": far[:, 1], "slots": near["slots"] + shift}
    eagle_kernels.raw.write_kv(**near)
    eagle_kernels.raw.write_kv(**moved)
    for index, name in enumerate(CACHES):
        for slot in (3, 40):
            row = far[num_pages - 3 + slot // 16, index, slot % 16]
            assert_equal("write_kv", "far pages", name, row, near[name][slot // 16, slot % 16])
    far[-3:] = 0
    assert not any(part.any() for part in far.split(2**17))


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
def test_full_cross(page_size, dtype, device):
    for head_dim, num_kv_heads, is_interleaved in itertools.product((64, 80, 128, 256), (1, 3, 8), (False, True)):
        for cache_dtype in (dtype, *EIGHT_BITS):
            if cache_dtype in (FN, FNUZ) and not target.has_fp8(device, cache_dtype):
                continue
            slots = torch.randperm(20 * page_size)[:17].tolist()
            for rotary_dim in (0, 32, head_dim):
                shape = (page_size, 4 * num_kv_heads, num_kv_heads, head_dim, dtype, cache_dtype)
                options = {"slots": slots, "num_pages": 20, "rotary_dim": rotary_dim, "is_interleaved": is_interleaved}
                check(make(*shape, **options, device=device), f"{shape} {rotary_dim}")
