"""mla_decode against float64: sizes of latents and pages, both page tables, 8-bit latents, windows, poisoned pools."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.latent.shared.tiles import TUNING
from op_tests.harness import assert_close, assert_equal, assume_multiprocessors, check_close, retune

from ..attention.cases import FLOAT8, WITHOUT_FLOAT8, make_decode
from .cases import as_latents, of_every_dtype_and_size, with_float8

# (latent, rope, heads, page size, dtype, lengths)
SHAPES = [
    (512, 64, 16, 16, torch.float16, [70, 5]),
    (512, 64, 3, 1, torch.float32, [33, 0]),
    (256, 32, 8, 64, torch.float16, [65, 130]),
    (128, 64, 20, 256, torch.float16, [255, 257]),
    (128, 64, 4, 2, torch.float32, [15, 16, 17]),
    (64, 64, 5, 32, torch.float16, [64, 1]),  # one tile of columns
    (96, 32, 2, 8, torch.float32, [31]),
    (64, 0, 2, 4, torch.float32, [21]),  # nothing turns
    (80, 16, 70, 128, torch.float16, [50]),  # more heads than a tile of rows
    (4, 2, 1, 16, torch.float32, [9, 0, 40]),
]


def make(latent_dim, rope_dim, num_heads, page_size, dtype, lengths, **cache):
    values = make_decode(latent_dim + rope_dim, num_heads, 1, page_size, dtype, lengths, **cache)
    return as_latents(values, latent_dim)


check = functools.partial(check_close, "latent.mla_decode", fields=("output", "lse"))
NOT_SUPPORTED = WITHOUT_FLOAT8
# the sums of 64 rows take half of all registers; what others hold is kept outside of the loop over keys
MAY_SPILL = {"512+64 128 heads"}


def ahead_of_time_cases():
    yield "512+64 bfloat16", make(512, 64, 16, 64, torch.bfloat16, [100])
    yield "512+64 128 heads", make(512, 64, 128, 64, torch.bfloat16, [100])
    yield "512+64 float32 csr", make(512, 64, 16, 1, torch.float32, [100], form="csr")
    yield "256+32 float16", make(256, 32, 16, 16, torch.float16, [100])
    yield "128+64 bfloat16", make(128, 64, 8, 16, torch.bfloat16, [100])
    everything = make(512, 64, 16, 16, torch.bfloat16, [100], is_strided=True) | {"window": 50}
    yield "window", everything
    yield "deterministic", everything | {"deterministic": True}
    for dtype in FLOAT8:
        yield str(dtype), with_float8(everything, dtype)
    yield "one request", make(512, 64, 16, 64, torch.bfloat16, [8000])
    yield "planned", make(512, 64, 16, 64, torch.bfloat16, [100, 30]) | {"plan": torch.tensor([0, 2, 3]).int()}


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_size(lambda *sizes: make(*sizes[:2], 16, 16, sizes[2], [100]))


# one request, up to 32 and more than 32, each with merges of few or many parts
MOST_VARIANTS = {"_attention_kernel": 3, "_merge_kernel": 4}


def size_sweep():
    for batch_size, length in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024, 4000)):
        yield make(16, 16, 4, 16, torch.float16, [length] * batch_size)


def wrong_calls():
    values = make(64, 16, 2, 16, torch.float32, [40, 33])
    yield values | {"latent_dim": 96}, "query must have D in 96..224, of which latent_dim = 96 are the latent, got 80"
    yield values | {"latent_dim": 520}, "latent_dim must lie in 4..512, got 520"
    yield values | {"latent_dim": 513}, "latent_dim must lie in 4..512, got 513"
    yield values | {"sm_scale": 0.0}, "sm_scale must be above 0, got 0.0"
    yield values | {"sm_scale": None}, "sm_scale must be a number, got NoneType"
    yield values | {"latent_scale": torch.ones(1)}, "latent_scale must come with a cache of 8-bit floats"
    wide = torch.zeros(9, 16, 800)
    yield values | {"latent_cache": wide}, r"latent_cache must have D = 80 in axis 2"


@pytest.mark.cross
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    form = "csr" if SHAPES.index(shape) % 2 else "block_table"
    check(make(*shape, form=form, device=device), str(shape))


@pytest.mark.parametrize("multiprocessors", [1, 3, 264])
def test_chunks(multiprocessors, device, monkeypatch):
    """Requests that begin, end and are whole in a chunk, fill it, or have no keys."""
    assume_multiprocessors(monkeypatch, multiprocessors)
    check(make(64, 16, 2, 16, torch.float32, [700, 0, 1, 128], device=device), "chunks")


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_windows(window, device):
    """The pool is NaN where the window does not reach."""
    values = make(64, 32, 3, 16, torch.float32, [130, 3, 0, 64], device=device, is_strided=True)
    for request, length in enumerate(values["seq_lens"].tolist()):
        for slot in range(max(length - window, 0)):
            page = values["block_table"][request, slot // 16].item()
            values["latent_cache"][page, slot % 16] = float("nan")
    check(values | {"window": window}, f"window {window}")
    check(values | {"window": window, "deterministic": True}, f"window {window}, deterministic")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_float8(dtype, device):
    if dtype == torch.float32:
        values = with_float8(make(64, 16, 2, 16, dtype, [20], device=device))
        with pytest.raises(ValueError, match="latent_cache must have dtype float32"):
            eagle_kernels.raw.mla_decode(**values)
        return
    values = make(128, 64, 4, 16, dtype, [70, 0, 33], device=device)
    for scale in (0.0, 0.5, 3.0):
        check(with_float8(values, scale=scale), f"scale {scale}")
    check(with_float8(values) | {"latent_scale": None}, "no scale")


@pytest.mark.parametrize("row", [row for rows in TUNING.values() for row in rows], ids=lambda row: f"{row['max_rows']}")
def test_every_tuning_row(row, device, monkeypatch):
    retune(monkeypatch, TUNING, **({"maxnreg": None} | row | {"from_rows": 0}))
    check(make(128, 64, 40, 4, torch.float16, [200, 5], device=device), "row")


def test_absorbed_attention_is_that_of_the_heads(device):
    """Keys and values of every head from the latents, as DeepSeek-V2 defines them, in float64: the query takes the
    weights of the keys, and the scale is that of the whole head."""
    num_heads, nope_dim, rope_dim, latent_dim, value_dim, length = 3, 24, 16, 32, 20, 45
    values = make(latent_dim, rope_dim, num_heads, 16, torch.float32, [length], device="cpu")
    scale = (nope_dim + rope_dim) ** -0.5
    key_weight = torch.randn(num_heads, nope_dim, latent_dim, dtype=torch.float64)
    value_weight = torch.randn(num_heads, value_dim, latent_dim, dtype=torch.float64)
    query = torch.randn(num_heads, nope_dim, dtype=torch.float64) * 0.2
    turned = values["query"][0, :, latent_dim:].double()
    rows = values["latent_cache"][values["block_table"][0]].flatten(0, 1)[:length].double()
    latents, rope_key = rows[:, :latent_dim], rows[:, latent_dim:]
    keys = torch.cat([torch.einsum("kl,hnl->hkn", latents, key_weight), rope_key.expand(num_heads, -1, -1)], dim=-1)
    logits = torch.einsum("hd,hkd->hk", torch.cat([query, turned], dim=-1), keys) * scale
    expected = torch.einsum("hk,hkv->hv", logits.softmax(-1), torch.einsum("kl,hvl->hkv", latents, value_weight))
    values["query"][0, :, :latent_dim] = torch.einsum("hn,hnl->hl", query, key_weight)
    values = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    result = eagle_kernels.raw.mla_decode(**values | {"sm_scale": scale})
    output = torch.einsum("hl,hvl->hv", result.output[0].double().cpu(), value_weight)
    assert_close("mla_decode", "absorbed", "output", output.float(), expected, baseline=expected + 1e-5)
    assert_close("mla_decode", "absorbed", "lse", result.lse[0], torch.logsumexp(logits, -1))


def test_deterministic_bits_do_not_depend_on_the_batch(device):
    values = make(64, 16, 4, 16, torch.float16, [300, 0, 77, 513], device=device) | {"deterministic": True}
    together = eagle_kernels.raw.mla_decode(**values)
    for request in range(4):
        rows = slice(request, request + 1)
        alone = {name: values[name][rows].contiguous() for name in ("query", "block_table", "seq_lens")}
        result = eagle_kernels.raw.mla_decode(**values | alone)
        assert_equal("mla_decode", f"{request}", "output", result.output, together.output[rows])
        assert_equal("mla_decode", f"{request}", "lse", result.lse, together.lse[rows])


def test_nan_stays_in_its_request(device):
    values = make(64, 16, 2, 16, torch.float32, [20, 33], device=device)
    values["latent_cache"][values["block_table"][1, 0]] = float("nan")
    result = eagle_kernels.raw.mla_decode(**values)
    assert result.output[1].isnan().all() and not result.output[0].isnan().any()


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_heads", [1, 16, 20, 64, 128])
def test_full_cross(num_heads, dtype, device):
    for (latent_dim, rope_dim), page_size in itertools.product(((512, 64), (256, 32), (128, 64)), (1, 16, 64, 256)):
        lengths = torch.randint(0, 3000, (3,)).tolist() + [0, 64]
        values = make(latent_dim, rope_dim, num_heads, page_size, dtype, lengths, device=device)
        case = f"{num_heads} {latent_dim} {page_size}"
        check(values, case)
        check(values | {"window": 100}, f"{case}, window")
        check(values | {"deterministic": True}, f"{case}, deterministic")
        if dtype != torch.float32:
            check(with_float8(values), f"{case}, float8")
