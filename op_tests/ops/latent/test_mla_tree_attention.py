"""mla_tree_attention against float64: random trees, node by node along their paths; pages, ragged batches, windows."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.latent.shared.tiles import TUNING
from eagle_kernels.reference.ops.latent.mla_decode import mla_decode as reference
from op_tests.harness import assert_close, assert_equal, assert_in_bounds, assume_multiprocessors, check_close, retune

from ..attention import cases as attention
from ..attention.cases import FLOAT8, WITHOUT_FLOAT8
from .cases import as_latents, of_every_dtype_and_size, with_float8

# (latent, rope, heads, page size, dtype, rows, drafts, prefixes)
SHAPES = [
    (512, 64, 16, 16, torch.float16, 5, 5, [40, 0]),
    (512, 64, 2, 1, torch.float32, 3, 9, [20]),  # beams against levels of a draft
    (256, 32, 8, 64, torch.float16, 8, 8, [65]),
    (128, 64, 4, 256, torch.float16, 17, 70, [250, 3]),
    (128, 64, 3, 2, torch.float32, 5, 5, [63, 1]),
    (64, 64, 5, 32, torch.float16, 12, 12, [31]),
    (64, 16, 7, 128, torch.float32, 6, 130, [10]),
    (4, 2, 1, 16, torch.float32, 1, 1, [0, 1, 63]),
]


def make(latent_dim, rope_dim, num_heads, page_size, dtype, num_query, num_keys, prefixes, **options):
    values = attention.make_tree(
        num_query, num_keys, latent_dim + rope_dim, num_heads, 1, page_size, dtype, prefixes, **options
    )
    return as_latents(values, latent_dim)


def ragged(latent_dim, rope_dim, num_heads, page_size, dtype, counts, prefixes, **options):
    values = attention.make_ragged(counts, latent_dim + rope_dim, num_heads, 1, page_size, dtype, prefixes, **options)
    return as_latents(values, latent_dim)


check = functools.partial(check_close, "latent.mla_tree_attention", fields=("output", "lse"))
NOT_SUPPORTED = WITHOUT_FLOAT8
# the sums of 64 rows take half of all registers; what others hold is kept outside of the loop over keys
MAY_SPILL = {"512+64 bfloat16", "window", "ragged", "ragged chains"}
MAY_SPILL |= {f"{dtype} 512+64" for dtype in (torch.float16, torch.bfloat16)}


def ahead_of_time_cases():
    yield "512+64 bfloat16", make(512, 64, 16, 64, torch.bfloat16, 64, 64, [100])
    yield "512+64 two rows", make(512, 64, 2, 64, torch.bfloat16, 2, 2, [100])
    yield "512+64 float32 csr", make(512, 64, 2, 1, torch.float32, 8, 24, [100], form="csr")
    yield "256+32 float16", make(256, 32, 16, 16, torch.float16, 8, 8, [100])
    yield "128+64 bfloat16", make(128, 64, 8, 16, torch.bfloat16, 8, 8, [100])
    everything = make(512, 64, 16, 16, torch.bfloat16, 64, 64, [100], is_strided=True)
    everything |= {"window": 50, "positions": torch.zeros(64, dtype=torch.int64)}
    yield "window", everything
    yield "deterministic", everything | {"deterministic": True}
    for dtype in FLOAT8:
        yield str(dtype), with_float8(everything, dtype)
    yield "ragged", ragged(512, 64, 16, 16, torch.bfloat16, [3, 9], [20, 7])
    yield "ragged chains", ragged(512, 64, 16, 16, torch.bfloat16, [3, 9], [20, 7], is_causal=True)


def order_case():
    """In parts that are merged."""
    return make(16, 16, 4, 16, torch.float32, 3, 3, [300, 40])


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_size(lambda *sizes: make(*sizes[:2], 16, 16, sizes[2], 16, 16, [100]))


# one request, up to 32 and more than 32, each with merges of few or many parts
MOST_VARIANTS = {"_attention_kernel": 3, "_merge_kernel": 4}


def size_sweep():
    for batch_size, prefix in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024, 4000)):
        yield make(16, 16, 4, 16, torch.float16, 8, 8, [prefix] * batch_size)


def wrong_calls():
    values = make(32, 16, 2, 16, torch.float32, 3, 4, [20, 4])
    chain = {"num_draft_keys": 2, "is_causal": True, "tree_mask": None}
    yield values | chain, "num_draft_keys must be at least Nq = 3"
    yield values | {"is_causal": True}, "exactly one of tree_mask and is_causal=True must be given, got both"
    yield values | {"window": 4}, "positions must be given with window and tree_mask"
    yield values | {"latent_cache": torch.zeros(9, 3, 48)}, "latent_cache must have a page size that is a power of two"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    form = "csr" if SHAPES.index(shape) % 2 else "block_table"
    check(make(*shape, form=form, device=device), str(shape))


def random_tree(num_nodes: int) -> torch.Tensor:
    """Which nodes each node sees, bool [nodes, nodes]."""
    visible = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        visible[node] |= visible[int(torch.randint(node, ()))]
    return visible


def with_trees(values: dict) -> dict:
    """The same with random trees, and the depths of their nodes as positions."""
    batch_size, num_nodes = values["query"].shape[:2]
    visible = torch.stack([random_tree(num_nodes) for _ in range(batch_size)])
    device = values["query"].device
    prefixes = values["seq_lens"].cpu().long()
    return values | {
        "tree_mask": attention.pack(visible, values["tree_mask"].shape[-1]).to(device),
        "positions": (prefixes[:, None] + visible.sum(-1) - 1).flatten().to(device),
    }


def along_its_path(values: dict, request: int, row: int) -> dict:
    """The arguments of mla_decode for one node: its prefix and its path, side by side in new pages."""
    renamed = {"k_cache": values["latent_cache"][:, :, None], "v_cache": values["latent_cache"][:, :, None]}
    query, plain, _ = attention.along_its_path(values | renamed, request, row, "block_table")
    names = ("latent_dim", "sm_scale", "latent_scale", "window")
    plain = as_latents({"query": query} | plain, values["latent_dim"])
    return plain | {name: values[name] for name in names if name in values}


TREES = [
    ((512, 64, 2, 16, torch.float32, 9, 9, [20, 0]), {}),
    ((128, 64, 4, 1, torch.float32, 7, 7, [64]), {"window": 5}),
    ((64, 32, 16, 64, torch.float16, 20, 20, [130, 3]), {}),
    ((64, 32, 3, 16, torch.float16, 6, 6, [33]), {"float8": True}),
]


def in_float64(plain: dict) -> dict:
    wide = {name: plain[name].double() for name in ("query", "latent_cache")}
    wide["latent_cache"] = wide["latent_cache"] * plain.get("latent_scale", torch.ones(1, device=wide["query"].device))
    return {name: value for name, value in plain.items() if name != "latent_scale"} | wide


@pytest.mark.parametrize(("shape", "options"), TREES, ids=str)
def test_each_node_is_its_path_token_by_token(shape, options, device):
    """In float64, within what the op's own precision allows; the same as a chain."""
    values = with_trees(make(*shape, device=device))
    if "float8" in options:
        values = with_float8(values)
    values |= {name: options[name] for name in ("window",) if name in options}
    result = eagle_kernels.raw.mla_tree_attention(**values)
    num_query = values["query"].shape[1]
    for request, row in itertools.product(range(len(values["query"])), range(num_query)):
        plain = along_its_path(values, request, row)
        expected, baseline = reference(**in_float64(plain)), reference(**plain)
        length, depth = int(plain["seq_lens"]), int(plain["seq_lens"]) - int(values["seq_lens"][request])
        chain = plain | {"query": plain["query"][:, None].expand(-1, depth, -1, -1).contiguous(), "is_causal": True}
        chain["seq_lens"] = plain["seq_lens"] - depth
        chained = eagle_kernels.raw.mla_tree_attention(**chain)
        for field in ("output", "lse"):
            case, wanted = f"{request}, {row} of {length}", getattr(expected, field)[0]
            allowed = getattr(baseline, field)[0]
            assert_close("mla_tree_attention", case, field, getattr(result, field)[request, row], wanted, allowed)
            assert_close("mla_tree_attention", f"{case}, chain", field, getattr(chained, field)[0, -1], wanted, allowed)


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(("shape", "options"), TREES, ids=str)
def test_deterministic_nodes_are_plain_decoding(shape, options, device):
    """Each node has the bits of mla_decode along its path."""
    values = with_trees(make(*shape, device=device)) | {"deterministic": True}
    if "float8" in options:
        values = with_float8(values)
    values |= {name: options[name] for name in ("window",) if name in options}
    result = eagle_kernels.raw.mla_tree_attention(**values)
    for request, row in itertools.product(range(len(values["query"])), range(values["query"].shape[1])):
        expected = eagle_kernels.raw.mla_decode(**along_its_path(values, request, row), deterministic=True)
        for field in ("output", "lse"):
            got, wanted = getattr(result, field)[request, row], getattr(expected, field)[0]
            assert_equal("mla_tree_attention", f"{request}, {row}", field, got, wanted)


@pytest.mark.parametrize("is_causal", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_ragged(form, is_causal, device):
    values = ragged(64, 32, 3, 16, torch.float32, [3, 0, 9, 1], [20, 5, 0, 64], form=form, is_causal=is_causal,
                    device=device)  # fmt: skip
    check(values, "ragged")


@pytest.mark.parametrize("multiprocessors", [1, 3, 264])
def test_chunks(multiprocessors, device, monkeypatch):
    assume_multiprocessors(monkeypatch, multiprocessors)
    check(make(64, 16, 2, 16, torch.float32, 4, 4, [600, 0, 128, 1], device=device), "chunks")


@pytest.mark.parametrize("window", [1, 9, 200])
def test_windows_of_chains(window, device):
    chain = {"tree_mask": None, "is_causal": True, "window": window}
    check(make(64, 16, 2, 16, torch.float32, 5, 7, [40, 0], device=device) | chain, f"window {window}")


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for rows in TUNING.values() for row in rows], ids=lambda row: f"{row['max_rows']}")
def test_every_tuning_row(row, device, monkeypatch):
    retune(monkeypatch, TUNING, **({"maxnreg": None} | row | {"from_rows": 0}))
    check(make(128, 64, 8, 4, torch.float16, 12, 12, [0, 1, 200], device=device), "row")


def test_a_plan_changes_no_result(device):
    values = make(64, 16, 4, 16, torch.float32, 5, 5, [300, 0, 40], device=device)
    plan = eagle_kernels.raw.plan_attention(values["seq_lens"], num_drafts=5)
    check(values | {"plan": plan}, "planned")


def test_malformed_trees_stay_in_bounds(device):
    """Any words, and pages that there are not: every row is written, and nothing outside of the pool is read."""
    values = make(64, 16, 2, 16, torch.float32, 5, 5, [33, 4], device=device)
    values["tree_mask"] = (
        torch.tensor([-1, 0, 1 << 40, -(2**63), 5], device=device).expand(2, 5)[..., None].contiguous()
    )
    values["block_table"][0, 1] = 2**30
    with assert_in_bounds():
        result = check(values, "malformed")
    assert result.output.isfinite().all()


def test_dead_rows(device):
    """Requests without pages and rows that see nothing are 0 and -inf."""
    values = make(64, 16, 2, 4, torch.float32, 2, 4, [9, 9, 0], device=device)
    values["block_table"][1] = -1
    values["seq_lens"][1] = 0
    values["tree_mask"][2, 1] = 0
    result = check(values, "dead rows")
    assert (result.output[1] == 0).all() and (result.lse[1] == float("-inf")).all()
    assert (result.output[2, 1] == 0).all() and (result.lse[2, 1] == float("-inf")).all()


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_query", [1, 4, 16, 33, 64, 256])
def test_full_cross(num_query, dtype, device):
    for (latent_dim, rope_dim), page_size in itertools.product(((512, 64), (256, 32), (128, 64)), (1, 16, 64, 256)):
        for num_heads in (16,) if num_query > 64 else (1, 16, 128):
            prefixes = torch.randint(0, 1500, (2,)).tolist() + [0, 64]
            values = make(
                latent_dim, rope_dim, num_heads, page_size, dtype, num_query, num_query, prefixes, device=device
            )
            case = f"{num_query} {num_heads} {latent_dim} {page_size}"
            check(values, case)
            chain = values | {"tree_mask": None, "is_causal": True}
            check(chain, f"{case}, chain")
            check(chain | {"window": 100}, f"{case}, window")
            if dtype != torch.float32:
                check(with_float8(values), f"{case}, float8")
