"""share_drafts against its reference and against all closed sets of drafts: what is shared, ties, odd probabilities."""

import itertools
import math

import pytest
import torch

from op_tests.harness import check_operation, sweep
from op_tests.ops.draft.cases import random_tries

PATH = "draft.share_drafts"
NAN, INF = math.nan, math.inf


def make(
    batch_size, num_drafters, num_drafts, *, most=12, levels=4, vocabulary=3, grain=16, dtype=torch.int64,
    device="cpu", **options,
):  # fmt: skip
    """Random trees over few tokens, so that many are shared, with probabilities of few values, so that many tie."""
    tokens, parents = random_tries(batch_size * num_drafters, num_drafts, 0.4, vocabulary)
    shape = batch_size, num_drafters, num_drafts
    values = {"tokens": tokens.view(shape).to(dtype), "parents": parents.view(shape).to(dtype)}
    values["probs"] = torch.randint(1, grain + 1, shape).float() / grain
    if levels is not None:
        values["factors"] = torch.randint(1, 9, (num_drafters, levels)).float() / 4
    return {name: value.to(device) for name, value in values.items()} | {"num_speculative_tokens": most} | options


def ahead_of_time_cases():
    yield "P=2 M=31", make(2, 2, 31, most=31)
    yield "P=3 M=63 int32", make(2, 3, 63, most=63, dtype=torch.int32)
    yield "P=1 M=5", make(2, 1, 5, levels=None)
    yield "P=3 M=255", make(1, 3, 255, most=255, levels=8)
    yield "P=8 M=127", make(1, 8, 127, most=255, levels=None)


size_sweep = sweep(lambda batch_size, levels: make(batch_size, 2, 5, levels=levels), (1, 2, 16, 33))


@pytest.mark.cross
@pytest.mark.parametrize(("num_drafters", "num_drafts"), [(1, 1), (2, 5), (3, 9), (2, 0), (8, 4), (5, 12)])
@pytest.mark.parametrize("levels", [None, 1, 3], ids=str)
def test_matches_reference(num_drafters, num_drafts, levels, device):
    values = make(4, num_drafters, num_drafts, levels=levels, device=device)
    for most in (1, 3, 12, 70):
        check_operation(PATH, values | {"num_speculative_tokens": most}, case=f"K={most}")


@pytest.mark.cross
@pytest.mark.parametrize("vocabulary", [1, 2, 2**40])
def test_how_much_is_shared(vocabulary, device):
    result, _ = check_operation(PATH, make(4, 3, 16, vocabulary=vocabulary, most=48, grain=1, levels=None,
                                           device=device))  # fmt: skip
    if vocabulary == 2**40:
        assert (result.num_drafts == 48).all() and ((result.probs > 0).sum(1) == 1).all()


@pytest.mark.slow
def test_the_largest(device):
    result, _ = check_operation(PATH, make(1, 3, 255, most=255, vocabulary=9, device=device))
    assert result.num_drafts.tolist() == [255]
    check_operation(PATH, make(1, 8, 127, most=255, vocabulary=2, device=device))


def promises(values: dict, request: int) -> dict[tuple, float]:
    """The highest probability that a drafter gives each path once all but its last token are accepted."""
    found: dict[tuple, float] = {}
    factors = values.get("factors")
    for drafter in range(values["tokens"].shape[1]):
        tokens, parents, probs = (values[name][request, drafter].tolist() for name in ("tokens", "parents", "probs"))
        paths = {0: ()}
        for node, (token, parent, prob) in enumerate(zip(tokens, parents, probs), start=1):
            paths[node] = (*paths[parent], token)
            depth = len(paths[node])
            factor = 1.0 if factors is None else factors[drafter, min(depth, factors.shape[1]) - 1].item()
            found[paths[node]] = max(found.get(paths[node], 0.0), min(prob * factor, 1.0))
    return found


def worth_of(path: tuple, found: dict[tuple, float]) -> float:
    return math.prod(found[path[:end]] for end in range(1, len(path) + 1))


def best_worth(found: dict[tuple, float], most: int) -> float:
    """The most accepted tokens that any `most` drafts bring in the mean, each with all above it: all sets are tried."""
    best = 0.0
    for chosen in itertools.combinations(found, min(most, len(found))):
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            best = max(best, sum(worth_of(path, found) for path in chosen))
    return best


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_drafts_bring_more(most, seed, device):
    """Of all sets in which no draft lacks its parent: the sum of their scores is the highest."""
    torch.manual_seed(seed)
    values = make(3, 2, 5, most=most, levels=3, vocabulary=2, device=device)
    result, _ = check_operation(PATH, values)
    for request in range(3):
        found = promises(values, request)
        paths = paths_of(result, request)
        assert all(path[:-1] in paths or len(path) == 1 for path in paths) and len(set(paths)) == len(paths)
        scores = result.scores[request, : len(paths)].tolist()
        assert scores == pytest.approx([worth_of(path, found) for path in paths])
        assert sum(scores) == pytest.approx(best_worth(found, most))


def paths_of(result, request: int) -> list[tuple]:
    paths = [()]
    for token, parent in zip(result.tokens[request].tolist(), result.parents[request].tolist()):
        if token >= 0:
            paths.append((*paths[parent], token))
    return paths[1:]


def share(*tries, device, factors=None, most=9) -> tuple:
    """What comes of the tries of one request, each (tokens, parents, probabilities)."""
    names = ("tokens", "parents", "probs")
    values = {name: torch.tensor([each], device=device) for name, each in zip(names, zip(*tries))}
    if factors is not None:
        values["factors"] = torch.tensor(factors, device=device)
    result, _ = check_operation(PATH, values | {"num_speculative_tokens": most})
    return result


def test_worked_example(device):
    """The model is sure of 5 and not of what follows; the text has had 5 rarely, but 8 9 always after it."""
    model = [5, 6, 7], [0, 1, 0], [0.75, 0.25, 0.25]
    text = [4, 5, 8], [0, 0, 2], [0.5, 0.25, 1.0]
    result = share(model, text, device=device, most=3)
    assert result.tokens.tolist() == [[5, 4, 8]] and result.parents.tolist() == [[0, 0, 1]]
    assert result.scores.tolist() == [[0.75, 0.5, 0.75]]
    assert result.probs.tolist() == [[[0.75, 0.0, 0.0], [0.25, 0.5, 1.0]]]


def test_factors_are_those_of_drafter_and_depth(device):
    """The first drafter's are right at depth 1 alone, the second one's are worth twice what it says from depth 2 on."""
    tries = ([1, 2, 3], [0, 1, 2], [0.5] * 3), ([4, 5, 6], [0, 1, 2], [0.5] * 3)
    result = share(*tries, factors=[[2.0, 0.5], [0.5, 2.0]], device=device)
    assert result.scores[0, :6].tolist() == [1.0, 0.25, 0.0625, 0.25, 0.25, 0.25]
    assert share(*tries, factors=[[2.0], [0.0]], device=device).num_drafts.tolist() == [3]


def test_ties_go_to_the_earlier_drafter_and_draft(device):
    tries = ([1, 2], [0, 0], [0.5, 0.5]), ([3, 1], [0, 0], [0.5, 0.5])
    for most in (1, 2, 3):
        assert share(*tries, most=most, device=device).tokens.tolist() == [[1, 2, 3][:most]]


@pytest.mark.parametrize("prob", [0.0, -0.0, -1.0, NAN, -INF])
def test_improbable_drafts_are_left_out_with_all_below_them(prob, device):
    """But not those that another drafter has there."""
    result = share(([1, 2, 3], [0, 1, 0], [prob, 1.0, 0.25]), ([1, 4, -1], [0, 1, -1], [0.5, 1.0, 1.0]), device=device)
    assert result.tokens[0, :4].tolist() == [3, 1, 4, -1] and result.scores[0, :3].tolist() == [0.25, 0.5, 0.5]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_probabilities_above_1(device):
    result = share(([1, 2], [0, 1], [7.0, INF]), ([9, -1], [0, -1], [1.0, 1.0]), device=device)
    assert result.tokens[0, :3].tolist() == [1, 2, 9] and result.scores[0, :3].tolist() == [1.0] * 3
    for factor in (NAN, -1.0, 0.0):
        assert share(([1], [0], [1.0]), factors=[[factor]], device=device).num_drafts.tolist() == [0]
    assert share(([1], [0], [0.5]), factors=[[INF]], device=device).scores[0, 0] == 1.0


@pytest.mark.parametrize("probs", [(0.25, 0.5), (0.5, 0.25)])
def test_what_one_drafter_says_twice(probs, device):
    """Of siblings with one token the higher probability counts, and what is below either."""
    result = share(([1, 1, 2, 3], [0, 0, 1, 2], [*probs, 1.0, 0.5]), device=device)
    assert result.tokens[0, :4].tolist() == [1, 2, 3, -1] and result.scores[0, :3].tolist() == [0.5, 0.5, 0.25]
    assert result.probs[0, 0, :3].tolist() == [0.5, 1.0, 0.5]


def wrong_calls():
    """Yields values that the contract refuses, and what it says of them."""
    sound = make(2, 2, 5)
    yield make(1, 9, 5), r"tokens must have P in 1\.\.8, got 9"
    yield make(1, 3, 342), "tokens must have at most P \\* M = 1023 drafts a request, got 1026"
    yield sound | {"num_speculative_tokens": 256}, r"num_speculative_tokens must lie in 1\.\.255"
    yield sound | {"probs": sound["probs"].double()}, "probs must have dtype float32"
    yield sound | {"factors": torch.ones(3, 4)}, "factors must have P = 2"
    yield sound | {"factors": torch.ones(2, 0)}, "factors must have at least one level"
    yield {name: value for name, value in sound.items() if name != "probs"} | {"probs": None}, "probs must be a tensor"
