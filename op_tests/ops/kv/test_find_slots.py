"""find_slots: examples, every phase of a page, tokens without a page."""

import torch

import eagle_kernels
from op_tests.harness import sweep

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


def ahead_of_time_cases():
    yield "int64", make(3, 8, 4, 5, 20)
    yield "int32 limited", make(3, 8, 4, 5, 20, dtype=torch.int32, max_length=20)


size_sweep = sweep(
    lambda batch_size, sizes: make(batch_size, sizes[0], 16, sizes[1], 1024, max_length=4096), ((9, 64), (300, 5000))
)


def test_worked_example(device):
    """Pages of 16: a request that ends within a page, one that crosses into the next, one without a second page."""
    table = torch.tensor([[5, -1, -1], [2, 0, -1], [1, -1, 3]], dtype=torch.int32, device=device)
    first = torch.tensor([4, 15, 15], device=device)
    result = eagle_kernels.raw.find_slots(table, first, count=2, page_size=16, max_length=16)
    assert result.slots.tolist() == [[84, 85], [47, 0], [31, -1]]
    assert result.positions.tolist() == [[4, 5], [15, 15], [15, 15]]


def test_huge_page_ids(device):
    """Slots past 2^31."""
    table = torch.full((1, 2), 2**31 - 1, dtype=torch.int32, device=device)
    result = eagle_kernels.raw.find_slots(table, torch.tensor([255], device=device), count=2, page_size=256)
    assert result.slots.tolist() == [[2**39 - 1, 2**39 - 256]]
