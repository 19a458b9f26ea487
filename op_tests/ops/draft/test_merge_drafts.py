"""merge_drafts against its reference: tries that share much and nothing, limits, malformed tries."""

from __future__ import annotations

import pytest
import torch

from op_tests.harness import check_operation

PATH = "draft.merge_drafts"


def make(batch_size, num_drafts, num_others, *, vocabulary=3, dtype=torch.int64, device="cpu", **options):
    """Random trees over few tokens, most nodes behind the one before, so that many are shared."""

    def trie(count):
        node = torch.arange(1, count + 1)
        elsewhere = (torch.rand(batch_size, count) * node).long()
        parents = torch.where(torch.rand(batch_size, count) < 0.4, elsewhere, node - 1)
        return torch.randint(vocabulary, (batch_size, count)), parents

    names = ("tokens", "parents", "other_tokens", "other_parents", "attach")
    made = *trie(num_drafts), *trie(num_others), torch.randint(num_drafts + 1, (batch_size,))
    values = {name: value.to(device, dtype) for name, value in zip(names, made)}
    return values | {"num_speculative_tokens": min(255, max(1, num_drafts + num_others))} | options


def ahead_of_time_cases():
    yield "M=5 M2=3", make(2, 5, 3)
    yield "M=31 M2=32 int32", make(2, 31, 32, dtype=torch.int32)
    yield "M=255 M2=255", make(1, 255, 255)


def size_sweep():
    for batch_size in (1, 2, 3, 16, 17, 64, 257):
        values = make(1, 5, 4)
        values |= {
            name: value.expand(batch_size, *value.shape[1:]).contiguous()
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        yield values


@pytest.mark.cross
@pytest.mark.parametrize(("num_drafts", "num_others"), [(5, 3), (1, 1), (16, 15), (31, 40), (0, 4), (4, 0)])
def test_matches_reference(num_drafts, num_others, device):
    values = make(4, num_drafts, num_others, device=device)
    check_operation(PATH, values, case=f"M={num_drafts} M2={num_others}")
    for most in (1, 3, num_drafts, num_drafts + 1):
        check_operation(PATH, values | {"num_speculative_tokens": max(1, most)}, case=f"K={most}")


@pytest.mark.cross
@pytest.mark.parametrize("vocabulary", [2, 1, 2**40])
def test_how_much_is_shared(vocabulary, device):
    result, _ = check_operation(PATH, make(6, 20, 20, vocabulary=vocabulary, device=device))
    if vocabulary == 2**40:
        assert (result.num_drafts == 40).all()


def as_rows(*rows, device):
    return [torch.tensor([row], device=device) for row in rows]


@pytest.mark.parametrize(
    ("attach", "most", "tokens", "parents"),
    [
        # 5, 6 behind it, and 7 behind the root; then 5, 8 behind it, and 7
        (0, 9, [5, 6, 7, 8], [0, 1, 0, 1]),
        (2, 9, [5, 6, 7, 5, 8, 7], [0, 1, 0, 2, 4, 2]),
        (3, 4, [5, 6, 7, 5], [0, 1, 0, 3]),
        (3, 2, [5, 6], [0, 1]),
        (0, 2, [5, 6], [0, 1]),
        (4, 9, [5, 6, 7], [0, 1, 0]),
        (-1, 9, [5, 6, 7], [0, 1, 0]),
    ],
)
def test_worked_example(attach, most, tokens, parents, device):
    rows = as_rows([5, 6, 7], [0, 1, 0], [5, 8, 7], [0, 1, 0], device=device)
    names = ("tokens", "parents", "other_tokens", "other_parents")
    values = dict(zip(names, rows)) | {"attach": torch.tensor([attach], device=device)}
    result, _ = check_operation(PATH, values | {"num_speculative_tokens": most})
    count = int(result.num_drafts)
    assert (result.tokens[0, :count].tolist(), result.parents[0, :count].tolist()) == (tokens, parents)
