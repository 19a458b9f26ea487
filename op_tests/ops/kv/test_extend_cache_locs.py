"""extend_cache_locs: ragged and equal ranges, capacity, dead and malformed rows."""

import torch

import eagle_kernels
from op_tests.harness import sweep

from .cases import example_rows, random_rows

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


size_sweep = sweep(lambda batch_size, longest: make(batch_size, longest, 8), (1, 100, 1024))


def test_worked_example(device):
    """SGLang's: requests in rows 1 and 0, tokens 2..3 and 3..5; its output keeps what it held after them."""
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
