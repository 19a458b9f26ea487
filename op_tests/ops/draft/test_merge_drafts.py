"""merge_drafts against its reference: tries that share much and nothing, limits, malformed tries."""

import pytest
import torch

from op_tests.harness import check_operation, sweep
from op_tests.ops.draft.cases import random_tries

PATH = "draft.merge_drafts"


def make(batch_size, num_drafts, num_others, *, vocabulary=3, dtype=torch.int64, device="cpu", **options):
    """Random trees over few tokens, so that many are shared."""
    names = ("tokens", "parents", "other_tokens", "other_parents", "attach")
    tries = (random_tries(batch_size, count, 0.4, vocabulary) for count in (num_drafts, num_others))
    made = *next(tries), *next(tries), torch.randint(num_drafts + 1, (batch_size,))
    values = {name: value.to(device, dtype) for name, value in zip(names, made)}
    return values | {"num_speculative_tokens": min(255, max(1, num_drafts + num_others))} | options


def ahead_of_time_cases():
    yield "M=5 M2=3", make(2, 5, 3)
    yield "M=31 M2=32 int32", make(2, 31, 32, dtype=torch.int32)
    yield "M=255 M2=255", make(1, 255, 255)


size_sweep = sweep(lambda batch_size: make(batch_size, 5, 4))


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
        # 5, 6 below it, and 7 below the root; then 5, 8 below it, and 7
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
