"""mla_prefill against float64: prompts and chunks, windows, 8-bit latents, poisoned pools."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.latent.shared.tiles import TUNING
from op_tests.harness import assert_close, check_close, retune

from ..attention.cases import FLOAT8, WITHOUT_FLOAT8, make_prompts
from .cases import as_latents, of_every_dtype_and_size, with_float8

# (latent, rope, heads, page size, dtype, queries, keys before them)
SHAPES = [
    (512, 64, 4, 16, torch.float16, [9, 3], [12, 0]),
    (512, 64, 2, 1, torch.float32, [7], [3]),
    (256, 32, 8, 64, torch.float16, [20, 0, 5], [0, 5, 100]),
    (128, 64, 3, 256, torch.float16, [50], [10]),
    (64, 64, 5, 8, torch.float32, [12], [30]),
    (4, 2, 1, 2, torch.float32, [20, 3], [0, 9]),
]


def make(latent_dim, rope_dim, num_heads, page_size, dtype, counts, before, **cache):
    values = make_prompts(counts, before, latent_dim + rope_dim, num_heads, 1, page_size, dtype, **cache)
    return as_latents(values, latent_dim)


check = functools.partial(check_close, "latent.mla_prefill", fields=("output", "lse"))
NOT_SUPPORTED = WITHOUT_FLOAT8
# the sums of 64 rows take half of all registers; what others hold is kept outside of the loop over keys
MAY_SPILL = {"512+64 bfloat16", "window", "not causal"}
MAY_SPILL |= {f"{dtype} 512+64" for dtype in (torch.float16, torch.bfloat16)}


def ahead_of_time_cases():
    yield "512+64 bfloat16", make(512, 64, 16, 64, torch.bfloat16, [100], [40])
    yield "512+64 float32 csr", make(512, 64, 2, 1, torch.float32, [100], [0], form="csr")
    yield "256+32 float16", make(256, 32, 16, 16, torch.float16, [100], [0])
    yield "128+64 bfloat16", make(128, 64, 1, 16, torch.bfloat16, [30], [0])
    everything = make(512, 64, 16, 16, torch.bfloat16, [100], [40], is_strided=True) | {"window": 50}
    yield "window", everything
    yield "not causal", everything | {"is_causal": False, "window": None}
    for dtype in FLOAT8:
        yield str(dtype), with_float8(everything, dtype)


def order_case():
    return make(16, 16, 4, 16, torch.float32, [70, 3], [0, 30])


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_size(lambda *sizes: make(*sizes[:2], 16, 16, sizes[2], [100], [40]))


def size_sweep():
    for batch_size, count in itertools.product((1, 2, 3, 16, 17), (9, 32, 100, 1024, 4000)):
        yield make(16, 16, 4, 16, torch.float16, [count] * batch_size, [0] * batch_size)


def wrong_calls():
    values = make(32, 16, 2, 16, torch.float32, [20, 5], [0, 0])
    yield values | {"max_query": 0}, "max_query must be at least 1, got 0"
    yield values | {"sm_scale": float("inf")}, "sm_scale must be a finite number, got inf"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    form = "csr" if SHAPES.index(shape) % 2 else "block_table"
    check(make(*shape, form=form, device=device), str(shape))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 17])
def test_what_rows_see(window, is_causal, device):
    values = make(64, 16, 3, 16, torch.float32, [30, 1], [20, 64], device=device)
    check(values | {"window": window, "is_causal": is_causal}, f"{window} {is_causal}")


def test_float8(device):
    check(with_float8(make(128, 64, 4, 16, torch.float16, [20, 3], [9, 0], device=device)), "float8")


def test_more_queries_than_max_query(device):
    values = make(32, 16, 2, 16, torch.float32, [20, 5], [9, 0], device=device)
    whole = eagle_kernels.raw.mla_prefill(**values)
    some = eagle_kernels.raw.mla_prefill(**values | {"max_query": 7})
    for rows in (slice(0, 7), slice(20, 25)):
        assert_close("mla_prefill", "max_query", "output", some.output[rows], whole.output[rows])


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for rows in TUNING.values() for row in rows], ids=lambda row: f"{row['max_rows']}")
def test_every_tuning_row(row, device, monkeypatch):
    retune(monkeypatch, TUNING, **({"maxnreg": None} | row | {"from_rows": 0}))
    check(make(128, 64, 8, 4, torch.float16, [33, 5], [40, 0], device=device), "row")


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_full_cross(num_heads, dtype, device):
    for (latent_dim, rope_dim), page_size in itertools.product(((512, 64), (256, 32), (128, 64)), (1, 16, 64, 256)):
        counts, before = torch.randint(1, 200, (2,)).tolist(), torch.randint(0, 300, (2,)).tolist()
        values = make(latent_dim, rope_dim, num_heads, page_size, dtype, counts, before, device=device)
        case = f"{num_heads} {latent_dim} {page_size}"
        check(values, case)
        check(values | {"window": 100}, f"{case}, window")
        if dtype != torch.float32:
            check(with_float8(values), f"{case}, float8")
