"""kv_indices: worked examples, pages, start offsets, capacity, dead and malformed rows."""

import torch

import eagle_kernels
from op_tests.harness import assert_close, sweep

from .cases import example_rows, random_rows

# (batch, page_size, longest, starts given)
SHAPES = [(1, 1, 1, False), (3, 1, 40, False), (3, 1, 40, True), (2, 4, 20, False), (3, 4, 21, True), (2, 16, 33, True),
          (1, 64, 300, True), (2, 256, 300, False), (5, 3, 17, True)]  # fmt: skip


def paged_rows(batch_size, columns, page_size, *, dtype=torch.int64, device="cpu"):
    """random_rows whose tokens fill whole pages, each page of consecutive slots."""
    values = random_rows(batch_size, -(-columns // page_size), dtype=dtype, device=device)
    slots = values["req_to_token"][:, :, None] * page_size + torch.arange(page_size, dtype=dtype, device=device)
    return values | {"req_to_token": slots.flatten(1)[:, :columns].contiguous()}


def make(batch_size, page_size, longest, has_starts, *, dtype=torch.int64, slack=7, device="cpu"):
    seq_lens = torch.randint(0, longest + 1, (batch_size,))
    starts = torch.randint(0, 2 * page_size + 3, (batch_size,))
    values = {"seq_lens": seq_lens} | ({"starts": starts} if has_starts else {})
    values = {name: value.to(device=device, dtype=dtype) for name, value in values.items()}
    capacity = int((seq_lens // page_size).sum()) + 2 * batch_size + slack
    rows = paged_rows(batch_size, longest + 2 * page_size + 3, page_size, dtype=dtype, device=device)
    return rows | values | {"capacity": capacity, "page_size": page_size}


def ahead_of_time_cases():
    yield "int64", make(3, 1, 20, True)
    yield "int32 pages", make(3, 16, 40, True, dtype=torch.int32)
    yield "no starts", make(3, 16, 40, False, dtype=torch.int32)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 16, longest, False), (1, 100, 1024))


def test_worked_example(device):
    """SGLang's: rows 1000.. and 2000.., requests in rows 1 and 0, lengths 2 and 3, without and with starts."""
    rows = example_rows(1, 0, device=device) | {"seq_lens": torch.tensor([2, 3], device=device), "capacity": 7}
    for starts, expected in (
        (None, [2000, 2001, 1000, 1001, 1002]),
        (torch.tensor([4, 1], device=device), [2004, 2005, 1001, 1002, 1003]),
    ):
        result = eagle_kernels.raw.kv_indices(**rows, starts=starts)
        assert result.kv_indices.tolist() == expected + [-1, -1]
        assert result.kv_indptr.tolist() == [0, 2, 5]
        assert result.last_page_len.tolist() == [1, 1]


def test_worked_example_of_pages(device):
    """Rows 1000.., pages of 4: tokens 3..8 lie in three pages, 4..7 in one, none in none."""
    rows = example_rows(0, 0, 0, device=device)
    result = eagle_kernels.raw.kv_indices(
        **rows, seq_lens=torch.tensor([6, 4, 0], device=device), starts=torch.tensor([3, 4, 5], device=device),
        capacity=5, page_size=4,
    )  # fmt: skip
    assert result.kv_indices.tolist() == [250, 251, 252, 251, -1]
    assert result.kv_indptr.tolist() == [0, 3, 4, 4]
    assert result.last_page_len.tolist() == [1, 4, 0]


def test_attention_reads_them(device):
    """What is listed is what attention over the pages, in CSR form, needs."""
    page_size, num_pages = 4, 20
    seq_lens = torch.tensor([7, 12, 1], device=device)
    rows = {
        "req_pool_indices": torch.tensor([2, 0, 1], device=device),
        "req_to_token": torch.randperm(num_pages)[:12].view(3, 4, 1).mul(page_size).add(torch.arange(page_size))
        .flatten(1).to(device),
    }  # fmt: skip
    listed = eagle_kernels.raw.kv_indices(**rows, seq_lens=seq_lens, capacity=9, page_size=page_size)
    cache = torch.randn(2, num_pages, page_size, 1, 16, device=device)
    query = torch.randn(3, 1, 16, device=device)
    got = eagle_kernels.gqa_decode(
        query, *cache, kv_indptr=listed.kv_indptr, kv_indices=listed.kv_indices, last_page_len=listed.last_page_len
    ).output
    for request, (row, seq_len) in enumerate(zip(rows["req_pool_indices"].tolist(), seq_lens.tolist())):
        slots = rows["req_to_token"][row, :seq_len]
        key, value = (half.flatten(0, 1)[slots, 0] for half in cache)
        want = torch.softmax(query[request] @ key.t() / 4, dim=-1) @ value
        assert_close("kv_indices", f"request {request}", "attention", got[request], want)
