"""tree_attention against float64: random masks, draft blocks in and beside the pool, poisoned pools, dead rows."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.attention.shared import ordered
from eagle_kernels.ops.attention.shared.ordered_shares import count_ordered_shares
from eagle_kernels.ops.attention.tree_attention import TUNING
from eagle_kernels.runtime.launch import intercept
from op_tests.harness import assert_close, assert_equal, assert_in_bounds, assume_multiprocessors, check_close, retune
from op_tests.harness.pools import with_pools

from .cases import (
    EIGHT_BITS,
    WITHOUT_FLOAT8,
    along_its_path,
    of_every_dtype_and_head_dim,
    pack,
    paged_cache,
    with_float8,
)
from .cases import make_ragged as ragged
from .cases import make_tree as make

# (queries, draft keys, head_dim, group, kv heads, page size, dtype, prefixes)
SHAPES = [
    (1, 1, 16, 1, 1, 1, torch.float32, [0, 1, 63]),
    (5, 5, 64, 3, 2, 16, torch.float16, [64, 0]),
    (4, 12, 80, 2, 1, 32, torch.float32, [31, 20]),  # four beams against three levels
    (8, 8, 96, 5, 1, 64, torch.float16, [65]),
    (3, 33, 112, 7, 1, 128, torch.float32, [127]),
    (8, 64, 128, 4, 1, 256, torch.float16, [250, 3]),
    (2, 65, 128, 8, 1, 16, torch.float32, [10]),
    (17, 129, 192, 1, 1, 16, torch.float16, [30]),
    (2, 320, 256, 6, 1, 2, torch.float16, [9]),
    (5, 5, 512, 8, 1, 16, torch.float16, [20]),
    (3, 3, 384, 2, 1, 4, torch.float32, [9]),
    (40, 40, 32, 2, 1, 16, torch.float32, [17]),  # several tiles of rows
    (3, 9, 8, 2, 4, 16, torch.float16, [40, 5]),
    (6, 6, 160, 2, 1, 16, torch.float16, [33]),
]


check = functools.partial(check_close, "attention.tree_attention", fields=("output", "lse"))
NOT_SUPPORTED = {(f"{case}{rows}", target) for case, target in WITHOUT_FLOAT8 for rows in ("", " 128 rows")}


def ahead_of_time_cases():
    yield "D=64 float32 csr separate", make(8, 24, 64, 4, 2, 1, torch.float32, [100], form="csr", is_separate=True)
    for head_dim, dtype in ((80, torch.float16), (96, torch.bfloat16), (112, torch.float16), (128, torch.bfloat16),
                            (192, torch.float16), (256, torch.bfloat16), (512, torch.bfloat16)):  # fmt: skip
        yield f"D={head_dim} {dtype}", make(64, 64, head_dim, 8, 1, 64, dtype, [100])
    yield "D=256 float32", make(8, 24, 256, 4, 1, 16, torch.float32, [100])
    everything = make(64, 64, 128, 8, 1, 64, torch.float16, [100]) | {"window": 50, "soft_cap": 30.0}
    everything |= {"sinks": torch.zeros(8), "positions": torch.zeros(64, dtype=torch.int64)}
    yield "all that changes logits", everything
    yield "deterministic", everything | {"deterministic": True}
    everything["query"] = everything["query"].bfloat16()
    for dtype in EIGHT_BITS:
        yield str(dtype), with_float8(everything, dtype)
    yield "packed", with_pools(make(64, 64, 128, 8, 2, 64, torch.float16, [100]), "pthw")
    yield "ragged", ragged([3, 9], 128, 4, 2, 16, torch.bfloat16, [20, 7])
    yield "ragged chains", ragged([3, 9], 128, 4, 2, 16, torch.bfloat16, [20, 7], is_causal=True, is_separate=True)

    # many rows for many keys have tiles of their own
    yield "128 rows", make(64, 64, 128, 4, 8, 16, torch.bfloat16, [2100] * 4)
    yield "128 rows, pages of 1, separate", make(64, 64, 128, 4, 8, 1, torch.bfloat16, [2100] * 4, is_separate=True)
    yield "128 rows D=256", make(64, 64, 256, 8, 2, 16, torch.bfloat16, [2100] * 4)
    many = make(64, 64, 128, 4, 8, 16, torch.float16, [2100] * 4) | {"window": 50, "soft_cap": 30.0}
    yield "128 rows, more logits", many | {"sinks": torch.zeros(32), "positions": torch.zeros(256, dtype=torch.int64)}
    many["query"] = many["query"].bfloat16()
    for dtype in EIGHT_BITS:
        yield f"{dtype} 128 rows", with_float8(many | {"positions": torch.zeros(256, dtype=torch.int64)}, dtype)


def full_ahead_of_time_cases():
    yield from of_every_dtype_and_head_dim(lambda head_dim, dtype: make(64, 64, head_dim, 4, 2, 16, dtype, [100]))


# one request, up to 32 and more than 32, each with merges of few or many parts: a program alone looks for no others
MOST_VARIANTS = {"_attention_kernel": 3, "_merge_kernel": 4}


def size_sweep():
    for batch_size, prefix in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024, 4000)):
        yield make(8, 8, 16, 4, 1, 16, torch.float16, [prefix] * batch_size)


def wrong_calls():
    chain = {"num_draft_keys": 2, "is_causal": True, "tree_mask": None}
    yield make(3, 4, 32, 2, 1, 16, torch.float32, [20, 4]) | chain, "num_draft_keys must be at least Nq = 3"
    truths = {"tree_mask": torch.ones(2, 3, 3, dtype=torch.bool)}
    values = make(3, 4, 32, 2, 1, 16, torch.float32, [20, 4])
    yield values | truths, "tree_mask must have dtype int64, as pack_tree_mask makes it of bool, got bool"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    index = SHAPES.index(shape)
    form = "csr" if index % 2 else "block_table"
    check(make(*shape, form=form, is_separate=index % 4 >= 2, device=device), str(shape))


def test_splits(device):
    """Long enough for several splits, with prefixes that fill none, one, or all of them."""
    check(make(2, 4, 32, 2, 1, 16, torch.float32, [600, 0, 128], device=device), "splits")


@pytest.mark.parametrize("is_separate", [False, True])
def test_narrow_heads_are_read_as_one(is_separate, device):
    """Four rows of two heads, of which each sees its own keys and drafts."""
    values = make(2, 2, 64, 2, 4, 16, torch.float16, [90, 0, 33], is_separate=is_separate, device=device)
    launches = []
    with intercept(lambda *launch: launches.append(launch)):
        eagle_kernels.raw.tree_attention(**values)
    assert launches[0][3]["SHAPE"].JOINED == 2
    check(values, "narrow")


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for rows in TUNING.values() for row in rows], ids=lambda row: f"{row['max_rows']}")
def test_every_tuning_row(row, device, monkeypatch):
    """Tiles that only large batches have."""
    retune(monkeypatch, TUNING, **({"maxnreg": None} | row | {"least_programs": 0}))
    for head_dim, page_size, extra in ((128, 16, {}), (64, 64, {"window": 70}), (80, 1, {"soft_cap": 5.0})):
        values = make(64, 64, head_dim, 4, 2, page_size, torch.float16, [0, 1, 200], is_separate=head_dim == 64,
                      device=device)  # fmt: skip
        if "window" in extra:
            extra["positions"] = values["seq_lens"].repeat_interleave(64) + torch.arange(64, device=device).repeat(3)
        check(values | extra, f"{head_dim}")


@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
def test_one_request_has_the_chunks_that_fit_the_gpu(is_separate, device, monkeypatch):
    """As many as there are programs, whatever the number of requests that a program looks at at once."""
    retune(monkeypatch, TUNING, programs=(1, 1))
    assume_multiprocessors(monkeypatch, 8)
    values = make(2, 2, 64, 2, 1, 16, torch.float32, [2000], is_separate=is_separate, device=device)
    empty, partial = torch.empty, []

    def noted(shape, **options):
        tensor = empty(shape, **options)
        if len(shape) == 3:  # the lse of parts [places, tokens, heads]
            partial.append(tensor.fill_(float("nan")))
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    eagle_kernels.raw.tree_attention(**values)
    assert int((~partial[-1].isnan()).any(-1).any(-1).sum()) == 8


@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_chain_equals_one_query_at_a_time(form, is_separate, device):
    """Row i of a chain is plain decoding over the prefix and i + 1 draft keys."""
    prefix, count = 21, 4
    values = make(count, count, 32, 3, 1, 16, torch.float32, [prefix], kind="chain", form=form,
                  is_separate=is_separate, device=device)  # fmt: skip
    result = eagle_kernels.raw.tree_attention(**values)
    pool = paged_cache([prefix + count], 1, 1, 32, torch.float32, device=device)
    pages = pool["block_table"][0].long()
    for name, draft in (("k_cache", "draft_key"), ("v_cache", "draft_value")):
        table = values["block_table"][0] if form == "block_table" else values["kv_indices"][values["kv_indices"] >= 0]
        rows = values[name][table[table >= 0].long()].flatten(0, 1)
        rows = torch.cat([rows[:prefix], values[draft][0]]) if is_separate else rows[: prefix + count]
        pool[name][pages, 0] = rows
    for node in range(count):
        pool["seq_lens"].fill_(prefix + node + 1)
        plain = eagle_kernels.raw.gqa_decode(values["query"][:, node].contiguous(), **pool)
        assert_close("tree_attention", f"node {node}", "output", result.output[:, node], plain.output)
        assert_close("tree_attention", f"node {node}", "lse", result.lse[:, node], plain.lse)


@pytest.mark.parametrize("window", [1, 2, 5, 33, 64, 300])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_window_of_siblings(window, form, device):
    """Rows see by depth, not by place: the window may end in the prefix, at its end, or within the tree."""
    depths = torch.tensor([0, 1, 1, 1, 2, 2, 3, 4])
    values = make(8, 8, 32, 2, 1, 16, torch.float32, [290, 3, 0], form=form, device=device)
    lengths = torch.tensor([290, 3, 0])
    values["positions"] = (lengths[:, None] + depths).flatten().to(device)
    check(values | {"window": window}, f"window {window}")


@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_windows_read_no_mask_of_the_prefix(form, is_separate, device):
    """The masks begin with the draft block, many words after the tile where a window begins."""
    values = make(3, 70, 32, 2, 1, 16, torch.float32, [300, 3, 64], form=form, is_separate=is_separate, device=device)
    values["positions"] = torch.tensor([300, 3, 64]).repeat_interleave(3).to(device)
    values["key_positions"] = torch.tensor([300, 3, 64]).repeat_interleave(70).to(device)
    with assert_in_bounds():
        check(values | {"window": 100}, "in bounds")


def test_window_of_draft_levels(device):
    """Four beams of the third level against the keys of three levels."""
    values = make(4, 12, 32, 2, 1, 16, torch.float32, [40, 3], is_separate=True, device=device)
    lengths = torch.tensor([40, 3])
    values["positions"] = (lengths[:, None] + torch.full((4,), 3)).flatten().to(device)
    values["key_positions"] = (lengths[:, None] + torch.arange(12) // 4 + 1).flatten().to(device)
    for window in (1, 2, 3, 20):
        check(values | {"window": window}, f"window {window}")


@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("window", [None, 1, 4, 40])
def test_causal_is_the_mask_of_a_chain(window, is_separate, device):
    values = make(5, 7, 32, 2, 1, 16, torch.float32, [40, 0], kind="chain", is_separate=is_separate, device=device)
    masked = dict(values)
    if window is not None:
        lengths = torch.tensor([40, 0])
        masked["positions"] = (lengths[:, None] + torch.arange(5) + 2).flatten().to(device)
        masked["key_positions"] = (lengths[:, None] + torch.arange(7)).flatten().to(device)
    del values["tree_mask"]
    result = check(values | {"is_causal": True, "window": window}, "causal")
    expected = eagle_kernels.raw.tree_attention(**masked, window=window)
    assert_equal("tree_attention", "causal", "output", result.output, expected.output)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_ragged(form, is_separate, is_causal, device):
    values = ragged([3, 0, 9, 1], 32, 3, 2, 16, torch.float32, [20, 7, 300, 0], form=form, is_separate=is_separate,
                    is_causal=is_causal, device=device)  # fmt: skip
    check(values, "ragged")
    check(values | {"deterministic": True}, "ragged, deterministic")  # masks have bits of keys that a request lacks
    prefixes = torch.tensor([20, 300, 0])
    starts = torch.repeat_interleave(prefixes, torch.tensor([3, 9, 1]))
    depths = torch.cat([torch.arange(count) // 2 for count in (3, 9, 1)])
    check(values | {"window": 6, "positions": (starts + depths).to(device)}, "ragged, window")


@pytest.mark.cross
@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_rows_beyond_max_query(form, is_separate, device):
    """The rows that are attended are what they are where all are, and the others are not written."""
    values = ragged([2, 9, 5], 32, 2, 1, 16, torch.float32, [20, 150, 64], form=form, is_separate=is_separate,
                    is_causal=True, device=device)  # fmt: skip
    expected = eagle_kernels.raw.tree_attention(**values)
    values["max_query"] = 4
    check(values | {"window": 30}, "beyond max_query, window", rows=[*range(6), *range(11, 15)])
    result = check(values, "beyond max_query", rows=[*range(6), *range(11, 15)])
    for first, last in ((0, 2), (2, 6), (11, 15)):
        assert_close("tree_attention", "all", "output", result.output[first:last], expected.output[first:last])


@pytest.mark.parametrize("bounds", [[-3, 4, 2**30], [0, 9, 5], [7, 7, 99]])
def test_malformed_bounds(bounds, device):
    values = ragged([2, 9], 32, 2, 1, 16, torch.float32, [20, 150], form="csr", is_causal=True, device=device)
    for name in ("k_cache", "v_cache"):
        values[name].nan_to_num_(1.0)
    values["qo_indptr"].copy_(torch.tensor(bounds))
    first, last = max(bounds[0], 0), min(max(bounds[1:]), 11)
    check(values, "malformed bounds", rows=list(range(first, last)))


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["float8", "int8"])
def test_soft_cap_sinks_and_float8(dtype, device):
    values = make(6, 6, 64, 4, 2, 16, torch.float16, [300, 5], is_separate=True, device=device)
    values = with_float8(values, dtype, k_scale=[0.5, 1.5], v_scale=[2.0, 0.75])
    values |= {"soft_cap": 10.0, "sinks": torch.randn(8, device=device)}
    check(values, "separate drafts")
    values["draft_key"] = values["draft_value"] = None
    values["seq_lens"] -= torch.tensor([6, 5], device=device, dtype=torch.int32)
    check(values, "drafts in the pool")


@pytest.mark.cross
@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("num_query", "prefix"), [(2, 300), (31, 300), (64, 300), (64, 100), (2, 1500)])
def test_deterministic_root_is_plain_decoding(num_query, prefix, has_sinks, device):
    """The root of a tree of any size, with any neighbours, has the bits of gqa_decode over the prefix and itself."""
    values = make(num_query, num_query, 32, 4, 1, 16, torch.float32, [prefix, 40], device=device)
    values["tree_mask"][:, 0] = 0
    values["tree_mask"][:, 0, 0] = 1
    values["sinks"] = torch.randn(4, device=device) if has_sinks else None
    result = eagle_kernels.raw.tree_attention(**values, deterministic=True)
    plain = {name: values[name] for name in ("k_cache", "v_cache", "sinks")}
    plain |= {"block_table": values["block_table"][:1], "seq_lens": values["seq_lens"][:1] + 1}
    expected = eagle_kernels.raw.gqa_decode(values["query"][:1, 0].contiguous(), **plain, deterministic=True)
    assert_equal("tree_attention", "root", "output", result.output[0, 0], expected.output[0])
    assert_equal("tree_attention", "root", "lse", result.lse[0, 0], expected.lse[0])


# (queries, draft keys, head_dim, group, kv heads, page size, prefixes), options, rows that are compared
PATHS = [
    ((7, 7, 32, 2, 1, 16, [60, 3]), {}, None),
    ((6, 6, 32, 4, 1, 1, [64, 0]), {"sinks": True}, None),
    ((5, 70, 16, 7, 2, 64, [127]), {"soft_cap": 5.0}, None),  # a row's heads lie in two tiles of rows
    ((9, 9, 32, 1, 1, 16, [253]), {"window": 30, "sinks": True}, None),  # windows begin in two shares
    ((4, 6, 32, 4, 1, 16, [1020]), {}, None),
    ((3, 3, 32, 2, 1, 16, [2300]), {"window": 1200, "sinks": True}, None),  # larger shares
    ((40, 40, 32, 2, 1, 16, [130]), {"eight_bits": None}, [0, 5, 31, 32, 39]),
    ((9, 9, 32, 2, 1, 16, [60]), {"eight_bits": torch.int8}, None),
]


@pytest.mark.cross
@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(("shape", "options", "rows"), PATHS, ids=str)
def test_deterministic_nodes_are_plain_decoding(shape, options, rows, device):
    """Each node has the bits of gqa_decode along its path, wherever its ancestors lie; so has the root of a batch."""
    *sizes, prefixes = shape
    form = "csr" if PATHS.index((shape, options, rows)) % 2 else "block_table"
    dtype = torch.float16 if "eight_bits" in options else torch.float32 if device.type == "cpu" else torch.bfloat16
    values = make(*sizes, dtype, prefixes, form=form, device=device)
    check_paths(values, options, rows, form, device)


def check_paths(values, options, rows, form, device):
    batch_size, num_query, num_heads, _ = values["query"].shape
    values["tree_mask"][..., 0] |= 1
    if options.get("sinks"):
        values["sinks"] = torch.randn(num_heads, device=device)
    if "eight_bits" in options:
        values |= with_float8(values, options["eight_bits"], k_scale=[0.5], v_scale=[2.0])
    values |= {name: options[name] for name in ("window", "soft_cap") if name in options}
    if "window" in values:  # keys have one position for all rows in trees alone
        parents = [-1, *(torch.randint(node, ()).item() for node in range(1, num_query))]
        visible = torch.eye(num_query, dtype=torch.bool)
        for node, parent in enumerate(parents[1:], 1):
            visible[node] |= visible[parent]
        words = pack(visible, values["tree_mask"].shape[-1]).to(device)
        values["tree_mask"] = words.expand(batch_size, -1, -1).contiguous()
    plain = {(b, row): along_its_path(values, b, row, form) for b in range(batch_size) for row in range(num_query)}
    if "window" in values:
        positions = [plain[b, row][2] for b in range(batch_size) for row in range(num_query)]
        values["positions"] = torch.tensor(positions, device=device)
    result = eagle_kernels.raw.tree_attention(**values, deterministic=True)
    for (b, row), (query, arguments, _) in plain.items():
        if rows is None or row in rows:
            expected = eagle_kernels.raw.gqa_decode(query, **arguments, deterministic=True)
            assert_equal("tree_attention", f"{b}, {row}", "output", result.output[b, row], expected.output[0])
            assert_equal("tree_attention", f"{b}, {row}", "lse", result.lse[b, row], expected.lse[0])


@pytest.mark.usefixtures("sums_in_order")
def test_deterministic_windows_begin_in_any_share(device, monkeypatch):
    """The root's window begins in one share, the others' in the next, with more shares than are merged at once: which
    ones that are goes by the keys' positions, not by where a request's window begins."""
    monkeypatch.setattr(ordered, "MERGED_SHARES", 4)
    retune(monkeypatch, ordered.TUNING, share_keys=64)
    for share in (2, 3):
        prefix = 64 * (share + 5) - 5
        values = make(3, 3, 16, 2, 1, 16, torch.float32, [prefix], device=device)
        check_paths(values, {"window": prefix + 2 - 64 * share}, None, "block_table", device)


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(
    ("prefix", "positions", "window"), [(20, [20, 21, 28], 4), (20, [500, 501, 20], 8), (32, [128, 129, 129], 1)]
)
def test_deterministic_windows_go_by_positions(prefix, positions, window, device):
    """Which need not be places of a path, and may lie where no key does; no sink is lost."""
    values = make(3, 3, 32, 2, 1, 16, torch.float32, [prefix], device=device)
    if prefix == 32:  # the drafts have no pages
        values["block_table"] = values["block_table"][:, :2].contiguous()
    values |= {"positions": torch.tensor(positions, device=device), "sinks": torch.randn(2, device=device)}
    check(values | {"window": window, "deterministic": True}, "positions")


@pytest.mark.gpu
def test_deterministic_nodes_of_models(device):
    """Trees of 64 nodes over prefixes of up to 9,000 keys, with the heads of Llama 8B and Qwen2.5 7B, in bf16."""
    for group, num_kv_heads in ((4, 8), (7, 4)):
        values = make(64, 64, 128, group, num_kv_heads, 16, torch.bfloat16, [640, 0, 9000, 4097], device=device)
        check_paths(values, {}, [0, 1, 17, 63], "block_table", device)


def test_ordered_shares_cover_all_tiles():
    """One after another, each tile once; and few of them."""

    def bounds(index, base):
        octave = max(index // 8 - 1, 0)
        return (index - 8 * octave) * (base << octave), base << octave

    for base in (1, 2, 3):
        tile, share = 0, 0
        while tile < 3000:
            first, size = bounds(share, base)
            assert first == tile
            for covered in range(first, first + size):
                assert count_ordered_shares(covered + 1, base) == share + 1
            tile, share = first + size, share + 1
    assert count_ordered_shares(2048, 2) == 64


def test_both_page_tables_and_both_draft_blocks_agree(device):
    torch.manual_seed(1)
    in_pool = make(4, 8, 32, 4, 1, 16, torch.float32, [40, 3], device=device)
    torch.manual_seed(1)
    csr = make(4, 8, 32, 4, 1, 16, torch.float32, [40, 3], form="csr", device=device)
    expected = eagle_kernels.raw.tree_attention(**in_pool)
    result = eagle_kernels.raw.tree_attention(**csr)
    assert_equal("tree_attention", "csr", "output", result.output, expected.output)
    separate = dict(in_pool)
    for name, cache in (("draft_key", "k_cache"), ("draft_value", "v_cache")):
        separate[name] = torch.stack([
            in_pool[cache][table[table >= 0].long()].flatten(0, 1)[prefix : prefix + 8]
            for table, prefix in zip(in_pool["block_table"], in_pool["seq_lens"].tolist())
        ])  # fmt: skip
    result = eagle_kernels.raw.tree_attention(**separate)
    assert_close("tree_attention", "separate", "output", result.output, expected.output)


def test_draft_keys_far_apart(device):
    """More than 2^31 elements from the first to the last, of which few are ever touched."""
    values = make(2, 300, 16, 2, 1, 16, torch.float16, [20], is_separate=True, device=device)
    drafts = torch.empty(1, 300, 2**31 // (32 * 290), 2, 1, 16, dtype=torch.float16, device=device)
    for index, name in enumerate(("draft_key", "draft_value")):
        far = drafts[:, :, 0, index]
        far.copy_(values[name])
        values[name] = far
    with assert_in_bounds():
        check(values, "far apart")


def test_wider_mask(device):
    """Words past the draft block are ignored, and so are the bits past it in its last word."""
    values = make(3, 4, 32, 2, 1, 16, torch.float32, [5], num_words=3, device=device)
    values["tree_mask"] |= ~0xF
    check(values, "wider mask")


def test_bit_63(device):
    values = make(2, 64, 32, 1, 1, 16, torch.float32, [0], device=device)
    values["tree_mask"].fill_(-(2**63))
    check(values, "bit 63")


@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_dead_rows(form, device):
    """Requests without pages and rows that see nothing are 0 and -inf, and the others keep their bits."""
    values = make(2, 4, 32, 2, 1, 4, torch.float32, [9, 9, 0], form=form, device=device)
    before = eagle_kernels.raw.tree_attention(**values)
    if form == "block_table":
        values["block_table"][1] = -1
        values["seq_lens"][1] = 0
    else:
        values["kv_indices"][values["kv_indptr"][1] : values["kv_indptr"][2]] = 2**30
    values["tree_mask"][2, 1] = 0
    result = check(values, "dead rows")
    assert (result.output[1] == 0).all() and (result.lse[1] == float("-inf")).all()
    assert (result.output[2, 1] == 0).all() and (result.lse[2, 1] == float("-inf")).all()
    assert torch.equal(result.output[0], before.output[0])


def test_draft_keys_that_nobody_sees_may_be_nan(device):
    values = make(2, 4, 32, 2, 1, 1, torch.float32, [3], device=device)
    values["tree_mask"].fill_(0b0101)
    values["k_cache"][values["block_table"][0, 4].long()] = float("nan")  # draft key 1
    assert not check(values, "unseen").output.isnan().any()


def test_fewer_slots_than_draft_keys(device):
    """CSR: a table shorter than the draft block has no prefix; keys past its end do not exist."""
    values = make(2, 4, 32, 1, 1, 4, torch.float32, [4], form="csr", device=device)
    values["kv_indptr"][1] = 1
    values["last_page_len"][0] = 2
    check(values, "short table")


@pytest.mark.gpu
@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
def test_long_prefixes(is_separate, device):
    """131072 slots beside short and empty prefixes."""
    values = make(64, 64, 128, 4, 2, 16, torch.bfloat16, [1 << 17, 5, 0, (1 << 17) - 40], is_separate=is_separate,
                  device=device)  # fmt: skip
    check(values, "131072 slots")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_root_in_a_batch_of_64(dtype, device):
    """The root of one tree of 64 has the bits of plain decoding alone."""
    prefixes = torch.randint(0, 5000, (64,)).tolist()
    values = make(33, 33, 128, 4, 2, 16, dtype, prefixes, device=device)
    values["tree_mask"][:, 0] = 1
    result = eagle_kernels.raw.tree_attention(**values, deterministic=True)
    plain = {name: values[name] for name in ("k_cache", "v_cache")}
    plain |= {"block_table": values["block_table"][17:18], "seq_lens": values["seq_lens"][17:18] + 1}
    expected = eagle_kernels.raw.gqa_decode(values["query"][17:18, 0].contiguous(), **plain, deterministic=True)
    assert_equal("tree_attention", "root of 64", "output", result.output[17, 0], expected.output[0])
    assert_equal("tree_attention", "root of 64", "lse", result.lse[17, 0], expected.lse[0])


CROSS_QUERIES = [1, 2, 31, 32, 33, 64, 65, 129, 256]
CROSS_DIMS = [64, 80, 128, 256]
CROSS_HEADS = [(1, 1), (3, 16), (4, 64), (8, 256)]  # (group, page size)
CROSS_FORMS = [("csr", False), ("block_table", True), ("block_table", False), ("csr", True)]  # (form, is_separate)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", CROSS_DIMS)
@pytest.mark.parametrize("num_query", CROSS_QUERIES)
def test_full_cross(num_query, head_dim, dtype, device):
    """Every head layout, as a tree, as a chain, and under a window; the form of the cache turns from test to test, so
    that all pairs occur."""
    turn = CROSS_QUERIES.index(num_query) + CROSS_DIMS.index(head_dim)
    for index, (group_size, page_size) in enumerate(CROSS_HEADS):
        form, is_separate = CROSS_FORMS[(index + turn) % len(CROSS_FORMS)]
        prefixes = torch.randint(0, 1500, (3,)).tolist() + [0, 64]
        num_keys = num_query + int(torch.randint(0, 257, ()))
        values = make(num_query, num_keys, head_dim, group_size, 2, page_size, dtype, prefixes, form=form,
                      is_separate=is_separate, device=device)  # fmt: skip
        case = f"{num_query} {num_keys} {head_dim} {group_size} {page_size} {form} {is_separate}"
        check(values, case)
        chain = values | {"tree_mask": None, "is_causal": True}
        check(chain, f"{case} chain")
        check(chain | {"window": 100}, f"{case} chain, window")
        starts = torch.tensor(prefixes)[:, None]
        depths = [torch.arange(count) // 3 for count in (num_query, num_keys)]
        places = [(starts + depth).flatten().to(device) for depth in depths]
        check(values | {"window": 100, "positions": places[0], "key_positions": places[1]}, f"{case} window")
