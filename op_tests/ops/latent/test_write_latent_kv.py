"""write_latent_kv against its reference, bit by bit, over whole pools: keys alone turn, 8-bit floats, slots."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.latent.write_latent_kv import write_latent_kv as reference
from eagle_kernels.runtime import target
from op_tests.harness import assert_close, assert_equal, check_operation, to_device
from op_tests.harness.cases import in_float64
from op_tests.harness.operation import as_bits

from ..attention.cases import WITHOUT_FLOAT8
from ..nn.tables import make_tables

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

# (page_size, query heads, latent, rope, dtype, dtype of the cache); page sizes need not be powers of two
SHAPES = [
    (1, 16, 512, 64, torch.float16, torch.float16),
    (64, 5, 256, 32, torch.float32, torch.float32),
    (16, 3, 512, 64, torch.float16, FN),
    (3, 128, 128, 64, torch.float32, FNUZ),
    (16, 2, 33, 10, torch.float16, torch.float16),
    (256, 1, 1, 2, torch.float32, FN),
]


def make(page_size, num_heads, latent_dim, rope_dim, dtype, cache_dtype, *, slots=None, rotary_dim=None,
         table_dtype=None, has_query=True, has_scale=None, num_pages=None, index_dtype=torch.int64, is_strided=False,
         device="cpu", **options):  # fmt: skip
    """Random latents, and a cache of random bits, NaN included. `slots` None: three scattered ones and one of -1.

    is_strided: latent and key are parts of one projection, and the cache is every other one of a pool of two. Skips the
    test on a GPU that has no such type as cache_dtype.
    """
    if cache_dtype in (FN, FNUZ) and not target.has_fp8(torch.device(device), cache_dtype):
        pytest.skip(f"{target.architecture(torch.device(device))} has no {cache_dtype}")
    if slots is None:
        num_pages = num_pages or max(3, -(-8 // page_size))
        slots = [*torch.randperm(num_pages * page_size)[:3].tolist(), -1]
    num_pages = num_pages or max(slots) // page_size + 2
    width, size = latent_dim + rope_dim, torch.empty(0, dtype=cache_dtype).element_size()
    pool = torch.randint(256, (num_pages, 2, page_size, width * size), dtype=torch.uint8).to(device).view(cache_dtype)
    rows = torch.randn(len(slots), width).to(dtype).to(device)
    latent, rope_key = rows[:, :latent_dim], rows[:, latent_dim:]
    values = {
        "latent": latent if is_strided else latent.contiguous(),
        "rope_key": rope_key if is_strided else rope_key.contiguous(),
        "latent_cache": pool[:, 0] if is_strided else pool[:, 0].contiguous(),
    }
    others = {"slots": torch.tensor(slots, dtype=index_dtype)}
    rotary_dim = rope_dim // 2 * 2 if rotary_dim is None else rotary_dim
    if rotary_dim:
        others["cos"], others["sin"] = make_tables(50, rotary_dim, table_dtype or dtype)
        others["positions"] = torch.randint(50, (len(slots),), dtype=index_dtype)
        if has_query:
            others["query"] = torch.randn(len(slots), num_heads, rope_dim).to(dtype)
    if has_scale if has_scale is not None else cache_dtype in (FN, FNUZ):
        others["latent_scale"] = torch.tensor([0.01])
    return values | to_device(others, device) | options


def check(values, case=""):
    return check_operation("latent.write_latent_kv", values, case=case)[0]


NOT_SUPPORTED = {(f"{dtype}{scales}", name) for dtype, name in WITHOUT_FLOAT8 for scales in ("", " without scales")}


def ahead_of_time_cases():
    shape = (64, 16, 512, 64)
    yield "bfloat16", make(*shape, torch.bfloat16, torch.bfloat16, is_strided=True)
    yield "float16 interleaved", make(*shape, torch.float16, torch.float16, is_interleaved=True, rotary_dim=32)
    yield "float32 without tables", make(1, 4, 128, 64, torch.float32, torch.float32, rotary_dim=0)
    for dtype in (FN, FNUZ):
        yield str(dtype), make(*shape, torch.bfloat16, dtype, table_dtype=torch.float32)
        yield f"{dtype} without scales", make(*shape, torch.bfloat16, dtype, has_scale=False)


def size_sweep():
    for num_tokens, num_pages in itertools.product((1, 2, 3, 16, 17, 64, 257), (300, 7, 4096)):
        shape = (1, 4, 32, 16, torch.float16, torch.float16)
        yield make(*shape, slots=[0] * num_tokens, num_pages=num_pages)
        yield make(*shape, slots=[0] * num_tokens, num_pages=5, is_strided=True)


def wrong_calls():
    values = make(16, 4, 64, 16, torch.float32, torch.float32, num_pages=3)
    yield values | {"latent_cache": torch.zeros(3, 16, 81)}, "latent_cache must have D = 80 in axis 2"
    yield (
        values | {"rope_key": torch.zeros(4, 19)[:, :16]},
        "rope_key must have a stride that is a multiple of 16, .*19",
    )
    yield values | {"latent": torch.zeros(4, 520)}, r"latent must have L in 1\.\.512, got 520"
    yield values | {"positions": None, "cos": None, "sin": None}, "query must come with positions, cos and sin"
    yield values | {"latent_scale": torch.ones(1)}, "latent_scale must come with a cache of 8-bit floats"


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, is_interleaved, device):
    index = SHAPES.index(shape)
    options = {"table_dtype": torch.float32 if index % 3 == 0 else None, "has_query": index % 4 != 1}
    options |= {"index_dtype": (torch.int64, torch.int32)[index % 2], "is_strided": index % 2 == 0}
    values = make(*shape, **options, is_interleaved=is_interleaved, device=device)
    check(values, f"{shape} {is_interleaved}")


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float16, FN], ids=str)
def test_is_rope_and_then_a_write(cache_dtype, is_interleaved, device):
    """Of the keys and of the queries, which land beside absorbed ones; latents keep their bits."""
    shape = (16, 4, 64, 32, torch.float16, cache_dtype)
    values = make(*shape, rotary_dim=16, is_interleaved=is_interleaved, device=device)
    apart, joined = values["latent_cache"].clone(), torch.full((4, 4, 96), 7.0, dtype=torch.float16, device=device)
    eagle_kernels.raw.write_latent_kv(**values, out=joined[..., 64:])
    tables = {name: values.pop(name) for name in ("positions", "cos", "sin", "is_interleaved")}
    turned = eagle_kernels.raw.rope(values.pop("query"), values["rope_key"][:, None].contiguous(), **tables)
    eagle_kernels.raw.write_latent_kv(**values | {"latent_cache": apart, "rope_key": turned.key[:, 0]})
    assert_equal("write_latent_kv", "apart", "query", joined[..., 64:], turned.query)
    assert (joined[..., :64] == 7.0).all()
    assert_equal("write_latent_kv", "apart", "cache", as_bits(values["latent_cache"]), as_bits(apart))


def test_within_twice_pytorch_s_error(device):
    for dtype, table_dtype in ((torch.float32, None), (torch.float16, None), (torch.float16, torch.float32)):
        values = make(16, 4, 32, 16, dtype, dtype, table_dtype=table_dtype, device=device)
        wide, same = in_float64(values), values | {"latent_cache": values["latent_cache"].clone()}
        calls = ((eagle_kernels.raw.write_latent_kv, values), (reference, wide), (reference, same))
        results = [function(**arguments) for function, arguments in calls]
        assert_close("write_latent_kv", str(dtype), "output", *results)
        slots = values["slots"][values["slots"] >= 0]
        rows = [arguments["latent_cache"].flatten(0, 1)[slots] for _, arguments in calls]
        assert_close("write_latent_kv", str(dtype), "cache", *rows)


def test_what_is_written_is_what_attention_reads(device):
    """Token by token into a cache, and one decode over it: the latents, weighted, whatever page they are on."""
    latent_dim, rope_dim, length = 32, 16, 21
    shape, slots = (4, 2, latent_dim, rope_dim, torch.float32, torch.float32), [*range(8, 8 + length)]
    values = make(*shape, slots=slots, num_pages=9, device=device)
    query = torch.randn(1, 3, latent_dim + rope_dim, device=device)
    tables = {name: values[name] for name in ("positions", "cos", "sin")}
    eagle_kernels.raw.write_latent_kv(**values)
    result = eagle_kernels.raw.mla_decode(
        query, values["latent_cache"], latent_dim=latent_dim, sm_scale=0.3,
        block_table=torch.arange(2, 9, device=device)[None], seq_lens=torch.tensor([length], device=device),
    )  # fmt: skip
    turned = eagle_kernels.raw.rope(values["query"], values["rope_key"][:, None], **tables).key[:, 0]
    rows = torch.cat([values["latent"], turned], dim=1).double()
    weights = (query[0].double() @ rows.T * 0.3).softmax(-1)
    assert_close("write_latent_kv", "read", "output", result.output[0], weights @ values["latent"].double())


DEAD = [-1, -7, 48, 49, 2**31 - 1]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, FN], ids=str)
def test_dead_slots_are_not_written(cache_dtype, index_dtype, device):
    dead = DEAD + ([2**40, -(2**40)] if index_dtype == torch.int64 else [])
    shape = (16, 2, 16, 8, torch.float32, cache_dtype)
    check(make(*shape, slots=[5, *dead, 33], num_pages=3, index_dtype=index_dtype, device=device), "dead slots")


def test_positions_outside_the_tables(device):
    values = make(16, 2, 16, 8, torch.float32, torch.float32, slots=[1, 2, 3, 4], device=device)
    values["positions"][1:] = torch.tensor([-1, 50, 2**40])
    check(values, "positions")
    assert torch.equal(values["latent_cache"][0, 2:5, 16:], values["rope_key"][1:])


def test_nothing_to_write(device):
    for slots in ([], [-1, -1]):
        values = make(16, 2, 16, 8, torch.float16, torch.float16, slots=slots, num_pages=2, device=device)
        assert check(values, "nothing").shape == (len(slots), 2, 8)
    values = make(16, 2, 16, 8, torch.float16, torch.float16, slots=[0, 1], num_pages=1, device=device)
    check(values | {"latent_cache": values["latent_cache"][:0]}, "a pool of no pages")


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_full_cross(dtype, device):
    for page_size, cache_dtype, is_interleaved in itertools.product((1, 16, 64, 256), (dtype, FN), (False, True)):
        shape = (page_size, 16, 512, 64, dtype, cache_dtype)
        slots = torch.randperm(4096)[:300].tolist()
        check(make(*shape, slots=slots, is_interleaved=is_interleaved, device=device), f"{page_size} {cache_dtype}")
