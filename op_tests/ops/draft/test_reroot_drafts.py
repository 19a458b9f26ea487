"""reroot_drafts against its reference: paths that stay in the trie and that leave it, limits, malformed tries."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep
from op_tests.ops.draft.cases import random_tries

PATH = "draft.reroot_drafts"


def make(batch_size, num_drafts, *, path_size=3, vocabulary=3, dtype=torch.int64, device="cpu", **options):
    """Random trees; each path follows its tree as far as that goes, then any way."""
    values = dict(zip(("tokens", "parents"), random_tries(batch_size, num_drafts, 0.3, vocabulary)))
    values["path"] = torch.randint(vocabulary, (batch_size, path_size))
    for request in range(batch_size):
        end = 0
        for place in range(path_size):
            children = (values["parents"][request] == end).nonzero().flatten()
            if len(children) == 0:
                break
            end = int(children[torch.randint(len(children), ())]) + 1
            values["path"][request, place] = values["tokens"][request, end - 1]
    values = {name: value.to(device, dtype) for name, value in values.items()}
    return values | {"num_speculative_tokens": 12, "spec_steps": 5} | options


def ahead_of_time_cases():
    yield "M=15", make(2, 15)
    yield "M=63 int32", make(2, 63, dtype=torch.int32, num_speculative_tokens=63)
    yield "M=1023", make(1, 1023, num_speculative_tokens=255)


size_sweep = sweep(
    lambda batch_size, path_size: make(batch_size, 15, path_size=path_size, spec_steps=1 + path_size),
    (0, 1, 2, 16, 33),
)


@pytest.mark.parametrize("num_drafts", [1, 2, 15, 16, 31, 100, 255])
@pytest.mark.parametrize("path_size", [0, 1, 4])
def test_matches_reference(path_size, num_drafts, device):
    values = make(4, num_drafts, path_size=path_size, device=device)
    check_operation(PATH, values, case=f"M={num_drafts} T={path_size}")


def test_the_largest_trie(device):
    check_operation(PATH, make(1, 1023, num_speculative_tokens=1023, spec_steps=2000, device=device))
    chain = make(1, 1023, num_speculative_tokens=1000, spec_steps=990, device=device)
    chain["parents"] = torch.arange(1023, device=device)[None]
    chain["path"] = chain["tokens"][:, :20].contiguous()
    result, _ = check_operation(PATH, chain)
    assert result.num_drafts.tolist() == [990]
    assert torch.equal(result.tokens[0, :990], chain["tokens"][0, 20:1010])


TOKENS = [5, 6, 7, 8, 6, 9, 5, 4]
PARENTS = [0, 0, 1, 1, 2, 4, 4, 5]  # 5 and 6 below the root; 7 and 8 below 5; 9 and 5 below 8; a 6 below 6; 4 below it


@pytest.mark.parametrize(
    ("path", "tokens", "parents"),
    [
        ([-1, -1], TOKENS, PARENTS),
        ([5, -1], [7, 8, 9, 5], [0, 0, 2, 2]),
        ([5, 8], [9, 5], [0, 0]),
        ([6, -1], [6, 4], [0, 1]),
        ([6, 6], [4], [0]),
        ([5, 7], [], []),
        ([7, -1], [], []),
        ([5, 6], [], []),
        ([-1, 5], TOKENS, PARENTS),
    ],
)
def test_worked_example(path, tokens, parents, device):
    as_row = lambda data: torch.tensor([data], device=device)  # noqa: E731
    values = {"tokens": as_row(TOKENS), "parents": as_row(PARENTS), "path": as_row(path)}
    result, _ = check_operation(PATH, values | {"num_speculative_tokens": 9, "spec_steps": 9})
    count = int(result.num_drafts)
    assert (result.tokens[0, :count].tolist(), result.parents[0, :count].tolist()) == (tokens, parents)


def test_limits(device):
    values = make(4, 60, num_speculative_tokens=60, spec_steps=60, device=device)
    everything, _ = check_operation(PATH, values)
    for most in (1, 3, 59):
        result, _ = check_operation(PATH, values | {"num_speculative_tokens": most})
        assert torch.equal(result.tokens, everything.tokens[:, :most])
    for steps in (1, 2, 7):
        check_operation(PATH, values | {"spec_steps": steps})


def test_what_ngram_match_made_lives_on(device):
    """The text went on as the first path says: the drafts below are the rest of that path, and its branches."""
    history = torch.tensor([[1, 2, 3, 8, 1, 2, 4, 1, 2, 3, 5, 1, 2]], device=device)
    made = eagle_kernels.ngram_match(
        history, torch.tensor([13], device=device), num_speculative_tokens=9, spec_steps=3, max_ngram_size=2,
        max_matches=3,
    )  # fmt: skip
    assert made.tokens.tolist() == [[3, 5, 1, 4, 1, 2, 8, 1, -1]]
    result = eagle_kernels.raw.reroot_drafts(
        made.tokens, made.parents, torch.tensor([[3]], device=device), num_speculative_tokens=4, spec_steps=3
    )
    assert result.tokens.tolist() == [[5, 1, 8, 1]] and result.parents.tolist() == [[0, 1, 0, 3]]
