"""extend_cache_locs against its reference: ragged and equal ranges, capacity, dead and malformed rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation

from .cases import BATCH_SIZES, check_buffers, example_rows, in_wider, random_rows

# (batch, longest prefix, longest range)
SHAPES = [(1, 0, 1), (3, 20, 5), (5, 3, 40), (2, 700, 600)]


def make(batch_size, prefix, longest, *, is_uniform=False, dtype=torch.int64, slack=7, device="cpu"):
    starts = torch.randint(0, prefix + 1, (batch_size,))
    counts = torch.randint(0, longest + 1, (batch_size,))
    values = random_rows(batch_size, prefix + longest, dtype=dtype, device=device)
    values["starts"] = starts.to(device=device, dtype=dtype)
    if is_uniform:
        return values | {"num_tokens": longest}
    values["ends"] = (starts + counts).to(device=device, dtype=dtype)
    return values | {"capacity": int(counts.sum()) + slack}


def ahead_of_time_cases():
    yield "int64", make(3, 20, 5)
    yield "int32", make(3, 20, 5, dtype=torch.int32)
    yield "uniform", make(3, 20, 5, is_uniform=True, dtype=torch.int32)


def size_sweep():
    for batch_size, longest in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024)):
        yield make(batch_size, longest, 8)


@pytest.mark.parametrize("is_uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, is_uniform, device):
    values = make(*shape, is_uniform=is_uniform, dtype=dtype, device=device)
    check_operation("kv.extend_cache_locs", values, case=str(shape))


@pytest.mark.parametrize("is_uniform", [False, True], ids=["ragged", "uniform"])
def test_more_requests_than_a_tile_of_lengths(is_uniform, device):
    check_operation("kv.extend_cache_locs", make(130, 4, 3, is_uniform=is_uniform, device=device))


def test_worked_example(device):
    """SGLang's: requests in rows 1 and 0, tokens 2..3 and 3..5; its output keeps what it held behind them."""
    starts, ends = torch.tensor([[2, 3], [4, 6]], device=device)
    rows = example_rows(1, 0, device=device)
    result = eagle_kernels.raw.extend_cache_locs(**rows, starts=starts, ends=ends, capacity=6)
    assert result.cache_locs.tolist() == [2002, 2003, 1003, 1004, 1005, -1]
    assert result.positions.tolist() == [2, 3, 3, 4, 5, 0]
    assert result.indptr.tolist() == [0, 2, 5]


def test_worked_example_of_equal_ranges(device):
    """SGLang's: three tokens of each request."""
    result = eagle_kernels.raw.extend_cache_locs(
        **example_rows(1, 0, device=device), starts=torch.tensor([2, 3], device=device), num_tokens=3
    )
    assert result.cache_locs.tolist() == [2002, 2003, 2004, 1003, 1004, 1005]
    assert result.positions.tolist() == [2, 3, 4, 3, 4, 5]
    assert result.indptr.tolist() == [0, 3, 6] and result.overflow.tolist() == [0]


@pytest.mark.parametrize("capacity", [0, 1, 9])
def test_overflow_is_told_and_nothing_is_overrun(capacity, device):
    values = make(3, 20, 12, device=device)
    values["starts"].copy_(torch.tensor([3, 5, 8]))
    values["ends"].copy_(torch.tensor([9, 5, 20]))
    result, _ = check_operation("kv.extend_cache_locs", values | {"capacity": capacity}, case=str(capacity))
    assert result.overflow.item() == 18 and result.indptr.max() <= capacity


def test_exact_capacity(device):
    result, _ = check_operation("kv.extend_cache_locs", make(3, 20, 12, slack=0, device=device), case="exact")
    assert result.overflow.item() == 0 and (result.cache_locs >= 0).all()


def test_long_tail(device):
    """More tail than all programs reach in one pass."""
    check_operation("kv.extend_cache_locs", make(2, 20, 5, slack=3000, device=device), case="long")


@pytest.mark.parametrize("is_uniform", [False, True], ids=["ragged", "uniform"])
def test_dead_and_malformed_rows(is_uniform, device):
    """Rows outside the pool, columns past its end and slots below 0 are -1; empty and reversed ranges list nothing."""
    values = make(6, 20, 5, is_uniform=is_uniform, slack=60, device=device)
    values["req_pool_indices"][0] = -1
    values["req_pool_indices"][1] = 8
    values["starts"].copy_(torch.tensor([4, 4, -3, 23, 9, 10**6]))
    if not is_uniform:
        values["ends"].copy_(torch.tensor([6, 7, 2, 31, 5, 10**6 + 2]))
    values["req_to_token"][:, 1::3] = -5
    check_operation("kv.extend_cache_locs", values, case="dead")


def test_strided_table(device):
    values = make(3, 20, 5, device=device)
    values["req_to_token"] = in_wider(values["req_to_token"])
    check_operation("kv.extend_cache_locs", values, case="strided")


@pytest.mark.parametrize("keep_unused", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_into_buffers(dtype, keep_unused, device):
    values = make(3, 20, 5, device=device)
    check_buffers("kv.extend_cache_locs", values, dtype, ("cache_locs", "positions"), keep_unused)


@pytest.mark.parametrize("is_uniform", [False, True], ids=["ragged", "uniform"])
def test_empty_batch(is_uniform, device):
    values = make(0, 20, 5, is_uniform=is_uniform, device=device)
    result, _ = check_operation("kv.extend_cache_locs", values, case="empty")
    assert result.indptr.tolist() == [0] and (result.cache_locs == -1).all()


def test_no_tokens(device):
    result, _ = check_operation("kv.extend_cache_locs", make(3, 20, 0, is_uniform=True, device=device), case="none")
    assert result.indptr.tolist() == [0, 0, 0, 0] and result.cache_locs.shape == (0,)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("is_uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("longest", [1, 8, 64, 2000])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_full_cross(longest, batch_size, is_uniform, device):
    for prefix in (0, 33, 5000):
        check_operation("kv.extend_cache_locs", make(batch_size, prefix, longest, is_uniform=is_uniform, device=device))
