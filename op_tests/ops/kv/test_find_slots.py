"""find_slots against its reference: examples, every phase of a page, tokens without a page."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.kv.find_slots import find_slots as reference
from op_tests.harness import Guarded, assert_equal

from .cases import BATCH_SIZES, PAGE_SIZES

FIELDS = ("slots", "positions")
# (batch, count, page_size, pages of a request, longest prefix)
SHAPES = [(1, 1, 1, 8, 5), (3, 64, 16, 10, 90), (5, 9, 4, 12, 30), (2, 300, 64, 7, 100), (4, 33, 3, 20, 24)]


def make(batch_size, count, page_size, max_pages, longest, *, dtype=torch.int64, max_length=None, device="cpu"):
    """Tables of two columns more than are shown, in which some pages are missing."""
    table = torch.randperm(batch_size * (max_pages + 2)).view(batch_size, max_pages + 2)
    table[torch.rand(table.shape) < 0.1] = -1
    return {
        "block_table": table.to(device=device, dtype=torch.int32 if dtype == torch.int64 else dtype)[:, :max_pages],
        "first": torch.randint(0, longest + 1, (batch_size,)).to(device=device, dtype=dtype),
        "count": count,
        "page_size": page_size,
        "max_length": max_length,
    }


def check(values, case=""):
    expected = reference(**values)
    guards = [Guarded(tensor.shape, tensor.dtype, tensor.device) for tensor in expected]
    result = eagle_kernels.raw.find_slots(**values, out=tuple(guard.tensor for guard in guards))
    for name, guard, tensor, wanted in zip(FIELDS, guards, result, expected):
        assert_equal("find_slots", case, name, tensor, wanted)
        guard.check("find_slots", name)
    return result


def ahead_of_time_cases():
    yield "int64", make(3, 8, 4, 5, 20)
    yield "int32 limited", make(3, 8, 4, 5, 20, dtype=torch.int32, max_length=20)


def size_sweep():
    for batch_size, (count, max_pages) in itertools.product((1, 2, 3, 16, 17, 64, 257), ((9, 64), (300, 5000))):
        yield make(batch_size, count, 16, max_pages, 1024, max_length=4096)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, device):
    for max_length in (None, 25):
        check(make(*shape, dtype=dtype, max_length=max_length, device=device), f"{shape} {max_length}")


def test_worked_example(device):
    """Pages of 16: a request that ends within a page, one that crosses into the next, one without a second page."""
    table = torch.tensor([[5, -1, -1], [2, 0, -1], [1, -1, 3]], dtype=torch.int32, device=device)
    first = torch.tensor([4, 15, 15], device=device)
    result = eagle_kernels.raw.find_slots(table, first, count=2, page_size=16, max_length=16)
    assert result.slots.tolist() == [[84, 85], [47, 0], [31, -1]]
    assert result.positions.tolist() == [[4, 5], [15, 15], [15, 15]]


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_every_phase_of_a_page(page_size, device):
    """The slots of consecutive tokens are the rows of the pages, one after another."""
    max_pages = 5
    table = torch.randperm(max_pages, dtype=torch.int32)[None]
    rows = (table[0].long()[:, None] * page_size + torch.arange(page_size)).flatten().tolist()
    for first in range(max_pages * page_size + 2):
        values = {"block_table": table.to(device), "first": torch.tensor([first], device=device)}
        result = check(values | {"count": 3 * page_size, "page_size": page_size}, f"first {first}")
        wanted = (rows[first:] + [-1] * 3 * page_size)[: 3 * page_size]
        assert result.slots[0].tolist() == wanted


def test_tokens_without_a_page(device):
    values = make(5, 6, 4, 3, 20, device=device)
    values["first"].copy_(torch.tensor([-5, -1, 2**40, 2**31 - 1, -(2**40)]))
    result = check(values, "no page")
    assert (result.slots[2:] == -1).all() and (result.slots[0, :5] == -1).all()


def test_huge_page_ids(device):
    """Slots past 2^31."""
    table = torch.full((1, 2), 2**31 - 1, dtype=torch.int32, device=device)
    result = eagle_kernels.raw.find_slots(table, torch.tensor([255], device=device), count=2, page_size=256)
    assert result.slots.tolist() == [[2**39 - 1, 2**39 - 256]]


def test_empty(device):
    check(make(0, 6, 4, 3, 20, device=device), "no requests")
    check(make(3, 0, 4, 3, 20, device=device), "no tokens")
    check(make(3, 5, 4, 0, 20, device=device), "no pages")


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 8, 64, 256])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_full_cross(count, page_size, batch_size, device):
    check(make(batch_size, count, page_size, 700 // page_size + 1, 600, max_length=650, device=device))
