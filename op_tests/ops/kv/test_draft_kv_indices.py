"""draft_kv_indices against its reference: SGLang's worked examples, pages, windows, capacity, dead rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.kv.draft_kv_indices import Output
from op_tests.harness import Guarded, assert_equal, check_operation

from .cases import CROSS, PAIRWISE, example_rows, in_wider, random_rows

reference = eagle_kernels.reference.ops.kv.draft_kv_indices.draft_kv_indices

# (batch, topk, num_steps, page_size, longest prefix)
SHAPES = [(1, 1, 1, 1, 5), (3, 1, 4, 16, 40), (2, 4, 3, 1, 20), (3, 4, 5, 4, 30), (2, 8, 8, 16, 33), (2, 2, 1, 64, 70),
          (1, 3, 6, 256, 600)]  # fmt: skip

# (window_size, sink_size): shorter than the chain, shorter than a page, past the prefix, sinks of all kinds
WINDOWS = [(1, 0), (2, 1), (4, 0), (5, 3), (16, 40), (1000, 0)]


def make(batch_size, topk, num_steps, page_size, longest, *, dtype=torch.int64, slack=7, device="cpu", **window):
    seq_lens = torch.randint(0, longest + 1, (batch_size,))
    columns = longest + page_size + topk * (num_steps + 2 * page_size)
    return random_rows(batch_size, columns, dtype=dtype, device=device) | window | {
        "seq_lens": seq_lens.to(device=device, dtype=dtype),
        "topk": topk,
        "num_steps": num_steps,
        "capacity": topk * (int(seq_lens.sum()) + batch_size * num_steps) + slack,
        "page_size": page_size,
    }  # fmt: skip


def ahead_of_time_cases():
    yield "int64", make(2, 4, 5, 1, 20)
    yield "int32 pages", make(2, 8, 6, 16, 20, dtype=torch.int32)
    yield "chain", make(2, 1, 3, 16, 20, dtype=torch.int32)
    yield "moving window", make(2, 4, 64, 16, 20, window_size=9, sink_size=2, window_counts_drafts=True)


def size_sweep():
    for batch_size, longest in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024)):
        yield make(batch_size, 4, 3, 16, longest)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, device):
    check_operation("kv.draft_kv_indices", make(*shape, dtype=dtype, device=device), case=str(shape))


def test_more_requests_than_a_tile_of_lengths(device):
    check_operation("kv.draft_kv_indices", make(130, 1, 2, 1, 4, device=device))


@pytest.mark.cross
@pytest.mark.parametrize("sizes", PAIRWISE, ids=str)
def test_pairwise(sizes, device):
    topk, num_steps, page_size, batch_size = sizes
    check_operation("kv.draft_kv_indices", make(batch_size, topk, num_steps, page_size, 40, device=device))


EXAMPLES = {
    1: ([[1003], [1005], [2002], [2004]], [[1003, 1004], [1005, 1006], [2002, 2003], [2004, 2005]]),
    4: ([[1003], [1011], [2002], [2006]], [[1003, 1004], [1011, 1012], [2002, 2003], [2006, 2007]]),
}


@pytest.mark.parametrize("page_size", EXAMPLES)
def test_worked_example(page_size, device):
    """SGLang's: rows 1000.. and 2000.., lengths 3 and 2, two branches, two steps."""
    seq_lens = torch.tensor([3, 2], device=device)
    result = eagle_kernels.raw.draft_kv_indices(
        **example_rows(0, 1, device=device), seq_lens=seq_lens, topk=2, num_steps=2, capacity=20, page_size=page_size
    )
    prefixes = [[1000, 1001, 1002]] * 2 + [[2000, 2001]] * 2
    for step, drafts in enumerate(EXAMPLES[page_size]):
        expected = [slot for prefix, draft in zip(prefixes, drafts) for slot in prefix + draft]
        assert result.kv_indices[step].tolist() == expected + [-1] * (20 - len(expected))
    assert result.kv_indptr.tolist() == [[0, 4, 8, 11, 14], [0, 5, 10, 14, 18]]
    assert result.overflow.tolist() == [0]


WINDOW_EXAMPLES = [
    ({"window_size": 2, "sink_size": 1}, [[1000, 1004, 1005, 1006], [1000, 1004, 1005, 1006, 1007]]),
    ({"window_size": 4, "window_counts_drafts": True}, [[1003, 1004, 1005, 1006], [1004, 1005, 1006, 1007]]),
    ({"window_size": 1, "sink_size": 1, "window_counts_drafts": True}, [[1000, 1006], [1000, 1007]]),
    ({"window_size": 7}, [[*range(1000, 1007)], [*range(1000, 1008)]]),
]


@pytest.mark.parametrize(("window", "expected"), WINDOW_EXAMPLES, ids=str)
def test_worked_examples_of_windows(window, expected, device):
    """A prefix of six tokens, one branch, two steps; the first two are SGLang's."""
    result = eagle_kernels.raw.draft_kv_indices(
        **example_rows(0, device=device), seq_lens=torch.tensor([6], device=device),
        topk=1, num_steps=2, capacity=10, **window,
    )  # fmt: skip
    assert result.kv_indices.tolist() == [indices + [-1] * (10 - len(indices)) for indices in expected]
    assert result.kv_indptr.tolist() == [[0, len(indices)] for indices in expected]


@pytest.mark.parametrize("counts_drafts", [False, True], ids=["of the prefix", "of prefix and drafts"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window, counts_drafts, device):
    window = dict(zip(("window_size", "sink_size"), window)) | {"window_counts_drafts": counts_drafts}
    for shape in ((3, 1, 5, 1, 12), (2, 3, 3, 4, 30)):
        values = make(*shape, dtype=torch.int32, device=device, **window)
        check_operation("kv.draft_kv_indices", values, case=f"{shape} {window}")


@pytest.mark.parametrize("counts_drafts", [False, True], ids=["of the prefix", "of prefix and drafts"])
@pytest.mark.parametrize("capacity", [0, 5, 17])
def test_windows_overflow(capacity, counts_drafts, device):
    values = make(3, 2, 4, 4, 20, device=device, window_size=3, sink_size=1, window_counts_drafts=counts_drafts)
    check_operation("kv.draft_kv_indices", values | {"capacity": capacity}, case=str(capacity))


def test_a_window_that_moves_back_under_the_capacity(device):
    """What the first step lists past the capacity, in a block of its own, later steps list below it."""
    values = make(1, 1, 3, 1, 10, device=device, window_size=520, window_counts_drafts=True)
    values["req_to_token"] = torch.randint(2**31, (3, 700), device=device)
    values["seq_lens"].fill_(600)
    check_operation("kv.draft_kv_indices", values | {"capacity": 512}, case="512")


@pytest.mark.slow
def test_windows_of_long_prefixes(device):
    """The window and the sink are longer than a block; batches longer than a tile of lengths."""
    values = make(1, 1, 3, 1, 10, slack=4000, device=device, window_size=700, sink_size=600, window_counts_drafts=True)
    values["req_to_token"] = torch.randint(2**31, (3, 1700), device=device)
    values["seq_lens"].fill_(1650)
    check_operation("kv.draft_kv_indices", values, case="long")
    values = make(20, 1, 64, 1, 3, device=device, window_size=2, sink_size=1, window_counts_drafts=True)
    check_operation("kv.draft_kv_indices", values, case="many")


@pytest.mark.parametrize("capacity", [0, 1, 9, 35])
def test_overflow_is_told_and_nothing_is_overrun(capacity, device):
    values = make(3, 2, 3, 4, 20, device=device)
    needed = values["capacity"] - 7
    values["seq_lens"][0] += 1  # one more index for each branch than capacity was planned for
    result, _ = check_operation("kv.draft_kv_indices", values | {"capacity": capacity}, case=str(capacity))
    assert result.overflow.item() == needed + 2
    assert result.kv_indptr.max() <= capacity


def test_exact_capacity(device):
    result, _ = check_operation("kv.draft_kv_indices", make(3, 2, 3, 4, 20, slack=0, device=device), case="exact")
    assert result.overflow.item() == 0


def test_long_prefixes(device):
    """Several blocks a chunk, and more tail than all programs reach in one pass."""
    values = make(2, 1, 2, 1, 10, slack=5000, device=device)
    values["req_to_token"] = torch.randint(2**31, (4, 1700), device=device)
    values["seq_lens"].copy_(torch.tensor([1650, 513]))
    values["capacity"] += 4000
    check_operation("kv.draft_kv_indices", values, case="long")


def test_dead_and_malformed_rows(device):
    """Rows outside the pool, columns past its end and slots below 0 are -1; negative lengths count as 0."""
    values = make(4, 2, 3, 4, 20, slack=300, device=device)
    values["req_pool_indices"][0] = -1
    values["req_pool_indices"][1] = 6
    values["seq_lens"][1] = -9
    values["seq_lens"][2] = values["req_to_token"].shape[1] + 3
    values["seq_lens"][3] = 0
    values["req_to_token"][:, 1::3] = -5
    check_operation("kv.draft_kv_indices", values, case="dead")


def test_strided_table(device):
    values = make(3, 2, 3, 4, 20, device=device)
    values["req_to_token"] = in_wider(values["req_to_token"])
    check_operation("kv.draft_kv_indices", values, case="strided")


@pytest.mark.parametrize("keep_unused", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_into_the_middle_of_larger_buffers(dtype, keep_unused, device):
    """As a server's graph buffers are: rows further apart than they are long, indices of either size."""
    values = make(3, 2, 3, 4, 20, slack=11, device=device)
    columns = {"kv_indptr": 7, "kv_indices": values["capacity"]}
    wide = {name: Guarded((3, size + 5), kind, device)
            for (name, size), kind in zip(columns.items(), (torch.int32, dtype))}  # fmt: skip
    wide["overflow"] = Guarded((1,), torch.int32, device)
    before = {name: guarded.tensor.clone() for name, guarded in wide.items()}
    out = {name: guarded.tensor[..., : columns.get(name)] for name, guarded in wide.items()}
    out = Output(**out)
    expected = reference(**values, keep_unused=keep_unused, out=out)
    assert eagle_kernels.raw.draft_kv_indices(**values, keep_unused=keep_unused, out=out) is out
    for name, got in out._asdict().items():
        wide[name].check("draft_kv_indices", name)
        assert_equal("draft_kv_indices", "into buffers", name, got, getattr(expected, name).to(got.dtype))
        beside = (..., slice(columns.get(name), None))
        assert name == "overflow" or torch.equal(wide[name].tensor[beside], before[name][beside])
    used = expected.kv_indptr[:, -1].tolist()
    assert all((out.kv_indices[step, end:] == -1).all() != keep_unused for step, end in enumerate(used))
    public = eagle_kernels.draft_kv_indices(**values, keep_unused=keep_unused, out=out)
    assert_equal("draft_kv_indices", "public", "kv_indices", public.kv_indices, expected.kv_indices.to(dtype))


def test_empty_batch(device):
    result, _ = check_operation("kv.draft_kv_indices", make(0, 2, 3, 4, 20, device=device), case="empty")
    assert (result.kv_indptr == 0).all() and (result.kv_indices == -1).all()


def test_a_bad_buffer_is_named(device):
    values = make(3, 2, 3, 4, 20, device=device)
    out = eagle_kernels.raw.draft_kv_indices(**values)
    with pytest.raises(ValueError, match="out.kv_indices must have dtype int32, got float32"):
        eagle_kernels.raw.draft_kv_indices(**values, out=out._replace(kv_indices=out.kv_indices.float()))
    with pytest.raises(ValueError, match="out must hold 3 tensors, got 1"):
        eagle_kernels.raw.draft_kv_indices(**values, out=out[:1])


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CROSS, ids=str)
def test_full_cross(sizes, device):
    topk, num_steps, page_size, batch_size = sizes
    for window in ({}, {"window_size": 64, "sink_size": 4}, {"window_size": 64, "window_counts_drafts": True}):
        check_operation(
            "kv.draft_kv_indices", make(batch_size, topk, num_steps, page_size, 300, device=device, **window)
        )
