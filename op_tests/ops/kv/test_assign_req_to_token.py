"""assign_req_to_token: ragged ranges, what it must leave alone, malformed ranges and rows."""

import torch

import eagle_kernels
from op_tests.harness import sweep

from .cases import example_rows, random_rows

# (batch, longest prefix, longest range)
SHAPES = [(1, 0, 1), (3, 20, 5), (5, 3, 40), (2, 700, 600), (130, 4, 3)]


def make(batch_size, prefix, longest, *, dtype=torch.int64, table_dtype=None, device="cpu"):
    starts = torch.randint(0, prefix + 1, (batch_size,))
    counts = torch.randint(0, longest + 1, (batch_size,))
    values = {"starts": starts, "ends": starts + counts, "cache_locs": 10_000 + torch.randperm(int(counts.sum()))}
    values = {name: value.to(device=device, dtype=dtype) for name, value in values.items()}
    rows = random_rows(batch_size, prefix + longest, dtype=dtype, device=device)
    return rows | {"req_to_token": rows["req_to_token"].to(table_dtype or dtype)} | values


def ahead_of_time_cases():
    yield "int64", make(3, 20, 5)
    yield "int32", make(3, 20, 5, dtype=torch.int32)
    yield "int64 slots, int32 table", make(3, 20, 5, table_dtype=torch.int32)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, longest, 8), (1, 100, 1024))


def test_worked_example(device):
    """SGLang's: row 0 gets two slots after its three tokens, row 1 one after its two."""
    rows = example_rows(0, 1, device=device)
    before = rows["req_to_token"].clone()
    starts, ends = torch.tensor([[3, 2], [5, 3]], device=device)
    eagle_kernels.raw.assign_req_to_token(**rows, starts=starts, ends=ends, cache_locs=ends.new_tensor([70, 71, 72]))
    before[0, 3:5], before[1, 2] = torch.tensor([70, 71], device=device), 72
    assert torch.equal(rows["req_to_token"], before)


def test_what_was_written_is_read_back(device):
    """extend_cache_locs lists the slots that were assigned, in their order."""
    values = make(4, 20, 9, device=device)
    eagle_kernels.raw.assign_req_to_token(**values)
    slots = values.pop("cache_locs")
    listed = eagle_kernels.raw.extend_cache_locs(**values, capacity=len(slots))
    assert torch.equal(listed.cache_locs, slots) and listed.overflow.item() == 0
