"""chain_kv_indices: the pair of the naive EAGLE, longer chains, requests shorter than theirs."""

import torch

import eagle_kernels
from op_tests.harness import assert_close, sweep

from .cases import example_rows, random_rows

# (batch, num_verify_tokens, longest): lengths run from 0, so chains longer than requests are among them
SHAPES = [(1, 1, 1), (3, 1, 20), (3, 2, 20), (5, 4, 6), (2, 9, 12), (1, 33, 40), (2, 3, 600)]


def make(batch_size, num_verify_tokens, longest, *, dtype=torch.int64, slack=7, device="cpu"):
    kv_lens = torch.randint(0, longest + 1, (batch_size,))
    return random_rows(batch_size, longest, dtype=dtype, device=device) | {
        "kv_lens": kv_lens.to(device=device, dtype=dtype),
        "num_verify_tokens": num_verify_tokens,
        "capacity": num_verify_tokens * int(kv_lens.sum()) + slack,
    }


def ahead_of_time_cases():
    yield "int64", make(3, 4, 20)
    yield "int32", make(3, 4, 20, dtype=torch.int32)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 4, longest), (1, 100, 1024))


def test_worked_example(device):
    """The root sees all tokens but the draft, the draft sees itself too: 2 * kv_len - 1 indices a request."""
    result = eagle_kernels.raw.chain_kv_indices(
        **example_rows(1, 0, device=device), kv_lens=torch.tensor([3, 4], device=device),
        num_verify_tokens=2, capacity=14,
    )  # fmt: skip
    lists = [[2000, 2001], [2000, 2001, 2002], [1000, 1001, 1002], [1000, 1001, 1002, 1003]]
    assert result.kv_indices.tolist() == [slot for slots in lists for slot in slots] + [-1, -1]
    assert result.kv_indptr.tolist() == [0, 2, 5, 8, 12]
    assert result.overflow.tolist() == [0]


def test_attention_of_a_chain_without_a_mask(device):
    """One query a row over these lists is causal attention of the chain."""
    kv_lens, num_tokens = torch.tensor([7, 12], device=device), 3
    rows = random_rows(2, 12, device=device)
    listed = eagle_kernels.raw.chain_kv_indices(**rows, kv_lens=kv_lens, num_verify_tokens=num_tokens, capacity=60)
    cache = torch.randn(2, 64, 1, 1, 16, device=device)
    query = torch.randn(6, 1, 16, device=device)
    ones = torch.ones(6, dtype=torch.int32, device=device)
    got = eagle_kernels.gqa_decode(
        query, *cache, kv_indptr=listed.kv_indptr, kv_indices=listed.kv_indices, last_page_len=ones
    ).output
    for request, (row, kv_len) in enumerate(zip(rows["req_pool_indices"].tolist(), kv_lens.tolist())):
        key, value = cache[:, rows["req_to_token"][row, :kv_len], 0, 0]
        tokens = slice(request * num_tokens, (request + 1) * num_tokens)
        hidden = torch.ones(num_tokens, kv_len, dtype=torch.bool, device=device).triu(kv_len - num_tokens + 1)
        logits = (query[tokens, 0] @ key.t() / 4).masked_fill(hidden, float("-inf"))
        want = torch.softmax(logits, dim=-1) @ value
        assert_close("chain_kv_indices", f"request {request}", "attention", got[tokens, 0], want)
