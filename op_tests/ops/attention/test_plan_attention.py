"""plan_attention against its reference, and what attention makes of plans: its own, of other lengths, and malformed."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.attention.gqa_decode import TUNING
from eagle_kernels.ops.attention.shared.chunks import count_chunks
from eagle_kernels.runtime.launch import intercept
from op_tests.harness import (
    assert_close,
    assert_equal,
    assert_in_bounds,
    assume_multiprocessors,
    check_operation,
    replay_in_graph,
    retune,
    sweep,
)

from .cases import paged_cache

BATCH_SIZES = (1, 2, 31, 33, 256, 1000)


def make(lengths, *, dtype=torch.int32, device="cpu", **options):
    return {"seq_lens": torch.tensor(lengths, dtype=dtype, device=device)} | options


def ahead_of_time_cases():
    yield "int32", make([5, 70])
    yield "int64 window", make([5, 70], dtype=torch.int64, window=20, num_drafts=8)


size_sweep = sweep(lambda batch_size: make([100] * batch_size))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_drafts": 8}, {"window": 65}, {"num_drafts": 60, "window": 100}], ids=str)
def test_matches_reference(options, dtype, device):
    lengths = [0, 1, 63, 64, 65, 128, 700, -3, 129, 5000, 164, 163, 228]
    check_operation("attention.plan_attention", make(lengths, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_batches_of_every_size(batch_size, device):
    lengths = torch.randint(0, 2000, (batch_size,)).tolist()
    check_operation("attention.plan_attention", make(lengths, device=device))


def test_worked_example(device):
    """100 slots and 8 drafts end in their fourth block, 0 and 8 in their first, 64 and 8 in their third."""
    assert eagle_kernels.raw.plan_attention(**make([100, 0, 64], device=device, num_drafts=8)).tolist() == [0, 4, 5, 8]


def test_empty_batch(device):
    result, _ = check_operation("attention.plan_attention", make([], device=device))
    assert result.tolist() == [0]


# what each of the requests has: keys of all lengths, none, all keys in one of them, one long among short ones
RAGGED = ([700, 0, 1, 130, 64, 65, 0, 300], [0], [0, 0, 0, 900, 0], [1500, *[3] * 40], [129])


def check(case, function, values, plan, compare=assert_close):
    """What is attended with this plan is what is without any."""
    for field, got, expected in zip(("output", "lse"), function(**values, plan=plan), function(**values)):
        compare(function.__name__, case, field, got, expected)


def attention(kind, lengths, device, **options):
    """A call of gqa_decode or tree_attention as (the function, its arguments)."""
    values = paged_cache(lengths if kind == "decode" else [length + 5 for length in lengths], 16, 2, 32,
                         torch.float32, device=device)  # fmt: skip
    if kind == "decode":
        query = {"query": torch.randn(len(lengths), 4, 32, device=device)}
        return eagle_kernels.raw.gqa_decode, values | options | query
    values["seq_lens"] = values["seq_lens"] - 5
    mask = torch.tensor([1, 3, 5, 11, 21], device=device).expand(len(lengths), 5)[:, :, None].contiguous()
    return eagle_kernels.raw.tree_attention, values | options | {
        "query": torch.randn(len(lengths), 5, 4, 32, device=device), "tree_mask": mask
    }  # fmt: skip


@pytest.mark.cross
@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: f"B={len(lengths)}")
@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_attention_with_its_plan_is_attention_without(kind, lengths, multiprocessors, device, monkeypatch):
    """The same cuts, so the same bits."""
    assume_multiprocessors(monkeypatch, multiprocessors)
    function, values = attention(kind, lengths, device)
    plan = eagle_kernels.raw.plan_attention(values["seq_lens"], num_drafts=0 if kind == "decode" else 5)
    check(str(lengths), function, values, plan, assert_equal)


@pytest.mark.cross
@pytest.mark.parametrize("planned", [[1] * 8, [2000] * 8, [0, 700, 64, 1, 64, 0, 900, 1], [5000, 1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_no_key_is_lost_by_a_plan_of_other_lengths(kind, planned, device, monkeypatch):
    assume_multiprocessors(monkeypatch, 5)
    function, values = attention(kind, RAGGED[0], device)
    plan = eagle_kernels.raw.plan_attention(torch.tensor(planned, device=device))
    check(str(planned), function, values, plan)


@pytest.mark.cross
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("planned", [[1000, *[1] * 7], [1] * 8, [1, 40, 1, 1, 900, 1, 1, 1]], ids=str)
def test_no_key_is_lost_where_no_request_is_cut(planned, head_dim, device, monkeypatch):
    """Tables of one block, so that nothing is merged; a plan may say that there are more."""
    assume_multiprocessors(monkeypatch, 5)
    values = paged_cache([20, 3, 0, 20, 31, 32, 1, 9], 32, 2, head_dim, torch.float32, device=device)
    values["query"] = torch.randn(8, 4, head_dim, device=device)
    plan = eagle_kernels.raw.plan_attention(torch.tensor(planned, device=device))
    check(str(planned), eagle_kernels.raw.gqa_decode, values, plan)


@pytest.mark.cross
@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize(("counts", "prefixes"), [([2, 2, 2, 13, 13, 13, 13], [30, 30, 30, 2, 2, 2, 2]),
                                                  ([1, 13, 0, 5], [700, 3, 90, 0])], ids=str)  # fmt: skip
def test_the_mean_will_do_for_ragged_rows(counts, prefixes, is_separate, device, monkeypatch):
    assume_multiprocessors(monkeypatch, 7)
    filled = prefixes if is_separate else [prefix + count for prefix, count in zip(prefixes, counts)]
    values = paged_cache(filled, 32, 2, 128, torch.float32, device=device)
    values |= {
        "seq_lens": torch.tensor(prefixes, device=device), "is_causal": True, "max_query": max(counts),
        "query": torch.randn(sum(counts), 4, 128, device=device),
        "qo_indptr": torch.tensor([0, *counts], device=device).cumsum(0),
    }  # fmt: skip
    if is_separate:
        values |= {name: torch.randn(sum(counts), 2, 128, device=device) for name in ("draft_key", "draft_value")}
    plan = eagle_kernels.raw.plan_attention(values["seq_lens"], num_drafts=sum(counts) // len(counts))
    check(str(counts), eagle_kernels.raw.tree_attention, values, plan)


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [1, 3, 8])
@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_no_key_is_lost_by_the_plan_of_another_window(kind, multiprocessors, device, monkeypatch):
    assume_multiprocessors(monkeypatch, multiprocessors)
    num_drafts = 0 if kind == "decode" else 5
    function, values = attention(kind, RAGGED[0], device, sinks=torch.randn(4, device=device))
    lengths = values["seq_lens"]
    if num_drafts:
        values["positions"] = (lengths[:, None] + torch.tensor([0, 1, 1, 2, 2], device=device)).flatten()
    plans = [eagle_kernels.raw.plan_attention(lengths, num_drafts=num_drafts, window=each) for each in (None, 40, 300)]
    for window, plan in itertools.product((None, 40, 300), plans):
        check(f"window {window}", function, values | {"window": window}, plan)


def test_slots_past_two_billion_with_the_plan_of_another_window(device, monkeypatch):
    """Twice as many blocks as are left would be more slots than int32 counts."""
    assume_multiprocessors(monkeypatch, 4)
    lengths = torch.tensor([3 * 2**29 - 10], device=device)
    keys = torch.randn(2, 1, 256, 1, 32, device=device)
    values = {
        "query": torch.randn(1, 5, 4, 32, device=device), "k_cache": keys[0], "v_cache": keys[1], "window": 64,
        "block_table": torch.zeros(1, 3 * 2**21 + 4, dtype=torch.int32, device=device), "seq_lens": lengths,
        "tree_mask": torch.tensor([1, 3, 5, 11, 21], device=device).view(1, 5, 1),
        "positions": lengths + torch.tensor([0, 1, 1, 2, 2], device=device),
    }  # fmt: skip
    plan = eagle_kernels.raw.plan_attention(lengths, num_drafts=5)
    with assert_in_bounds():
        check("far", eagle_kernels.raw.tree_attention, values, plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_deterministic_bits_do_not_depend_on_the_plan(kind, device):
    function, values = attention(kind, RAGGED[0], device, deterministic=True)
    plan = eagle_kernels.raw.plan_attention(torch.tensor([3, 900, 0, 0, 1, 64, 700, 2], device=device))
    check("other plan", function, values, plan, assert_equal)


@pytest.mark.cross
@pytest.mark.parametrize(
    "plan",
    [[0] * 9, [-5] * 9, [2**31 - 1] * 9, list(range(8, -1, -1)), [0, 2**30, 3, -(2**31), 7, 2**31 - 1, 1, 9, 4],
     [2**31 - 1, 0, 0, 0, 0, 0, 0, 0, 2**31 - 1], [0, 90, 91, 92, 93, 94, 95, 96, 40]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["decode", "tree", "short"])
def test_malformed_plans_stay_in_bounds(kind, plan, device, monkeypatch):
    """Results are wrong then; what lies around the tensors is neither read nor written."""
    assume_multiprocessors(monkeypatch, 5)
    lengths = [9] * 8 if kind == "short" else RAGGED[0]
    function, values = attention("decode" if kind == "short" else kind, lengths, device)
    with assert_in_bounds():
        function(**values, plan=torch.tensor(plan, dtype=torch.int32, device=device))


@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_the_plan_of_another_batch_is_named(kind, device):
    function, values = attention(kind, [30, 40], device)
    plan = eagle_kernels.raw.plan_attention(torch.tensor([30, 40, 50], device=device))
    with pytest.raises(ValueError, match=r"plan must have shape \[3\], got \[4\]"):
        function(**values, plan=plan)
    with pytest.raises(ValueError, match="plan must have dtype int32, got int64"):
        function(**values, plan=plan[:3].long())


def test_equal_lengths_are_cut_alike():
    """None of them, or each into as many parts, where about as many programs allow that; never more than there are."""
    for batch_size, num_tiles, expected in ((1, 8, 16), (1, 4, 32), (1, 2, 64), (3, 8, 15), (8, 8, 16),
                                            (48, 8, 33), (8, 4, 32), (32, 4, 32), (128, 8, 32)):  # fmt: skip
        assert count_chunks(batch_size, num_tiles, 132, (1, 2)) == expected
    assert count_chunks(1, 1000, 132, (1, 1)) == count_chunks(9, 1000, 132, (2, 2)) == 1
    # twice as many where there would be fewer chunks than requests
    assert [count_chunks(batch_size, 8, 132, (2, 4)) for batch_size in (1, 33, 34)] == [32, 33, 34 + 32]


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 1), (2, 2), (9, 6)])
def test_rounds_of_programs_where_one_would_leave_many_idle(batch_size, expected, device, monkeypatch):
    """Tiles of rows for 100 of 132 programs: up to four rounds, and no more than there are requests."""
    assume_multiprocessors(monkeypatch, 132)
    values = paged_cache([64] * batch_size, 16, 100, 32, torch.float32, max_pages=400, device=device)
    values["query"] = torch.randn(batch_size, 100, 32, device=device)
    retune(monkeypatch, TUNING, programs=(1, 1))
    grids = []
    with intercept(lambda op, kernel, grid, arguments: grids.append(grid)):
        eagle_kernels.raw.gqa_decode(**values)
    assert grids[0] == (100, expected)


@pytest.mark.gpu
def test_graph_of_lengths_that_change(device):
    """One graph of the plan and the attention serves all lengths."""
    function, values = attention("decode", [700, 300, 64, 9], device)
    plan, out = eagle_kernels.raw.plan_attention(values["seq_lens"]), function(**values)

    def step():
        eagle_kernels.raw.plan_attention(values["seq_lens"], out=plan)
        function(**values, plan=plan, out=out)

    replay_in_graph(step, change=lambda: values["seq_lens"].copy_(torch.tensor([1, 299, 0, 9])))
    for field, got, expected in zip(out._fields, out, function(**values)):
        assert_equal("gqa_decode", "replay", field, got, expected)


@pytest.mark.gpu
def test_one_long_request_among_short_ones(device):
    """128k keys beside 255 requests of up to 20."""
    lengths = torch.randint(1, 20, (256,)).tolist()
    lengths[77] = 131072
    function, values = attention("decode", lengths, device)
    plan = eagle_kernels.raw.plan_attention(values["seq_lens"])
    got, alone = function(**values, plan=plan), function(**values, deterministic=True)
    assert_close("gqa_decode", "one long", "output", got.output, alone.output)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 64, 1000])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_full_cross(batch_size, window, device):
    for num_drafts, longest in itertools.product((0, 1, 64), (1, 200, 100_000)):
        lengths = torch.randint(0, longest + 1, (batch_size,)).tolist()
        values = make(lengths, device=device, num_drafts=num_drafts, window=window)
        check_operation("attention.plan_attention", values, case=f"{num_drafts} {longest}")
