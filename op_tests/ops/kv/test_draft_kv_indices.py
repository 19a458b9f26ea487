"""draft_kv_indices: SGLang's worked examples, pages, windows, capacity, dead rows."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import sweep

from .cases import example_rows, random_rows

# (batch, topk, num_steps, page_size, longest prefix)
SHAPES = [(1, 1, 1, 1, 5), (3, 1, 4, 16, 40), (2, 4, 3, 1, 20), (3, 4, 5, 4, 30), (2, 8, 8, 16, 33), (2, 2, 1, 64, 70),
          (1, 3, 6, 256, 600)]  # fmt: skip


def make(batch_size, topk, num_steps, page_size, longest, *, dtype=torch.int64, slack=7, device="cpu", **window):
    seq_lens = torch.randint(0, longest + 1, (batch_size,))
    columns = longest + page_size + topk * (num_steps + 2 * page_size)
    return random_rows(batch_size, columns, dtype=dtype, device=device) | window | {
        "seq_lens": seq_lens.to(device=device, dtype=dtype),
        "topk": topk, "num_steps": num_steps, "page_size": page_size,
        "capacity": topk * (int(seq_lens.sum()) + batch_size * num_steps) + slack,
    }  # fmt: skip


def ahead_of_time_cases():
    yield "int64", make(2, 4, 5, 1, 20)
    yield "int32 pages", make(2, 8, 6, 16, 20, dtype=torch.int32)
    yield "chain", make(2, 1, 3, 16, 20, dtype=torch.int32)
    yield "moving window", make(2, 4, 64, 16, 20, window_size=9, sink_size=2, window_counts_drafts=True)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 4, 3, 16, longest), (1, 100, 1024))


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
