"""draft_kv_indices against its reference: SGLang's worked examples, pages, capacity, dead and malformed rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from op_tests.harness import (
    assert_equal,
    assert_only_launches,
    check_operation,
    check_registration,
    replay_in_graph,
    to_device,
)

# (batch, topk, num_steps, page_size, longest prefix)
SHAPES = [(1, 1, 1, 1, 5), (3, 1, 4, 16, 40), (2, 4, 3, 1, 20), (3, 4, 5, 4, 30), (2, 8, 8, 16, 33), (2, 2, 1, 64, 70),
          (1, 3, 6, 256, 600), (130, 1, 2, 1, 4)]  # fmt: skip


def make(batch_size, topk, num_steps, page_size, longest, *, dtype=torch.int64, slack=7, device="cpu"):
    seq_lens = torch.randint(0, longest + 1, (batch_size,))
    columns = longest + page_size + topk * (num_steps + 2 * page_size)
    req_to_token = torch.randperm((batch_size + 2) * columns).view(batch_size + 2, columns)
    values = {
        "req_pool_indices": torch.randperm(batch_size + 2)[:batch_size],
        "req_to_token": req_to_token,
        "seq_lens": seq_lens,
    }
    values = {key: value.to(device=device, dtype=dtype) for key, value in values.items()}
    return values | {
        "topk": topk,
        "num_steps": num_steps,
        "capacity": topk * (int(seq_lens.sum()) + batch_size * num_steps) + slack,
        "page_size": page_size,
    }


def ahead_of_time_cases():
    yield "int64", make(2, 4, 5, 1, 20)
    yield "int32 pages", make(2, 8, 6, 16, 20, dtype=torch.int32)
    yield "chain", make(2, 1, 3, 16, 20, dtype=torch.int32)


def size_sweep():
    for batch_size, longest in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024)):
        yield make(batch_size, 4, 3, 16, longest)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, device):
    check_operation("kv.draft_kv_indices", make(*shape, dtype=dtype, device=device), case=str(shape))


EXAMPLES = {
    1: ([[1003], [1005], [2002], [2004]], [[1003, 1004], [1005, 1006], [2002, 2003], [2004, 2005]]),
    4: ([[1003], [1011], [2002], [2006]], [[1003, 1004], [1011, 1012], [2002, 2003], [2006, 2007]]),
}


@pytest.mark.parametrize("page_size", EXAMPLES)
def test_worked_example(page_size, device):
    """SGLang's: rows 1000.. and 2000.., lengths 3 and 2, two branches, two steps."""
    columns = torch.arange(32)
    result = eagle_kernels.raw.draft_kv_indices(
        torch.tensor([0, 1], device=device), torch.stack([1000 + columns, 2000 + columns]).to(device),
        torch.tensor([3, 2], device=device), topk=2, num_steps=2, capacity=20, page_size=page_size,
    )  # fmt: skip
    prefixes = [[1000, 1001, 1002]] * 2 + [[2000, 2001]] * 2
    for step, drafts in enumerate(EXAMPLES[page_size]):
        expected = [slot for prefix, draft in zip(prefixes, drafts) for slot in prefix + draft]
        assert result.kv_indices[step].tolist() == expected + [-1] * (20 - len(expected))
    assert result.kv_indptr.tolist() == [[0, 4, 8, 11, 14], [0, 5, 10, 14, 18]]
    assert result.overflow.tolist() == [0]


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
    """Rows outside the pool and columns past its end are -1; negative lengths count as 0."""
    values = make(4, 2, 3, 4, 20, slack=300, device=device)
    values["req_pool_indices"][0] = -1
    values["req_pool_indices"][1] = 6
    values["seq_lens"][1] = -9
    values["seq_lens"][2] = values["req_to_token"].shape[1] + 3
    values["seq_lens"][3] = 0
    check_operation("kv.draft_kv_indices", values, case="dead")


def test_strided_table(device):
    values = make(3, 2, 3, 4, 20, device=device)
    wide = torch.full((5, values["req_to_token"].shape[1] + 9), -77, device=device)
    wide[:, :-9] = values["req_to_token"]
    check_operation("kv.draft_kv_indices", values | {"req_to_token": wide[:, :-9]}, case="strided")


def test_empty_batch(device):
    result, _ = check_operation("kv.draft_kv_indices", make(0, 2, 3, 4, 20, device=device), case="empty")
    assert (result.kv_indptr == 0).all() and (result.kv_indices == -1).all()


def test_launches_and_nothing_else(device):
    assert_only_launches("kv.draft_kv_indices", make(3, 2, 3, 4, 20, device=device))


def test_registration(device):
    check_registration("draft_kv_indices", make(3, 2, 3, 4, 20, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 65}, "num_steps must lie in 1..64, got 65"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"capacity": -1}, "capacity must lie in 0..2147483647, got -1"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must have B = 3"),
        ({"seq_lens": torch.zeros(3)}, "seq_lens must have dtype int32 or int64, got float32"),
        ({"req_to_token": torch.zeros(8, 4, dtype=torch.int64).t()}, "req_to_token must be contiguous in its last 1"),
    ],
)
def test_bad_input_is_named(change, message, device):
    values = make(3, 2, 3, 4, 20) | change
    values = to_device(values, device)
    with pytest.raises((ValueError, TypeError), match="eagle_kernels.draft_kv_indices: .*" + message):
        eagle_kernels.raw.draft_kv_indices(**values)


@pytest.mark.gpu
def test_graph_replay_with_dead_rows(device):
    values = make(8, 4, 3, 16, 200, slack=9000, device=device)
    out = eagle_kernels.raw.draft_kv_indices(**values)

    def change():
        values["seq_lens"].copy_(torch.tensor([7, 300, 1, 0, 0, 0, 0, 0]))
        values["req_pool_indices"][3:].fill_(-1)

    replay_in_graph(lambda: eagle_kernels.raw.draft_kv_indices(**values, out=out), change=change)
    expected = eagle_kernels.reference.ops.kv.draft_kv_indices.draft_kv_indices(**values)
    for field, got, want in zip(out._fields, out, expected):
        assert_equal("draft_kv_indices", "replay", field, got, want)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
@pytest.mark.parametrize("num_steps", [1, 3, 5, 8])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_full_cross(topk, num_steps, page_size, batch_size, device):
    check_operation("kv.draft_kv_indices", make(batch_size, topk, num_steps, page_size, 700, device=device))
