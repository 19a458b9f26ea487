"""top_k_renorm: the reference's bits, an oracle that sorts, edges with ties, rows that mislead the sample."""

import pytest
import torch

from op_tests.harness import sweep, to_device

from . import renorms

PATH = "sampling.top_k_renorm"


def make(probs, top_k, device="cpu", dtype=torch.int64):
    top_k = torch.as_tensor(top_k, dtype=dtype).expand(len(probs)).contiguous()
    return to_device({"probs": probs, "top_k": top_k}, device)


def ahead_of_time_cases():
    yield "fp32", make(renorms.random_probs(2, 512), [5, 0])
    yield "bf16, odd size", make(renorms.random_probs(2, 301, dtype=torch.bfloat16), [5, 0], dtype=torch.int32)
    yield "fp16, V=128256", make(torch.rand(1, 128256).half(), 50)


size_sweep = sweep(lambda num_rows: make(torch.rand(num_rows, 1000), 50))


def check(values, case):
    """As the reference, and as an oracle that sorts."""
    actual = renorms.check(PATH, values, case)
    top_k = values["top_k"].tolist()

    def keeps(index, row):
        is_on = 0 < top_k[index] < len(row)
        return row >= row.sort(descending=True).values[top_k[index] - 1 if is_on else -1]

    renorms.assert_as_oracle("top_k_renorm", case, values["probs"], actual, keeps)
    return actual


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1025])
def test_matches_reference(vocab_size, device):
    top_k = [0, max(vocab_size // 2, 1), vocab_size - 1, vocab_size + 5]
    check(make(renorms.random_probs(4, vocab_size), top_k, device), f"V={vocab_size}")


def test_ties_at_the_edge_all_stay(device):
    probs = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.25] * 4, [0.5, 0.5, 0.0, 0.0]]).repeat_interleave(2, 0)
    kept = check(make(probs, [2, 3, 1, 3, 1, 3], device), "ties") > 0
    assert kept.sum(1).tolist() == [2, 4, 4, 4, 2, 2]
    check(make(renorms.dyadic_probs(3, 1025), [1, 100, 900], device), "dyadic grid")


def test_rows_that_no_bracket_holds(device):
    """All equal, and samples that lie: the edge is searched among all candidates, and in the row itself."""
    probs = torch.cat([torch.full((1, renorms.LONG), 0.25), renorms.misleading_probs(renorms.LONG)])
    check(make(probs, [50, 2000, 290], device), "lying samples")


def test_as_many_above_the_bracket_as_are_wanted(device):
    """A guess that is wrong by nothing but the edge itself: the first row has 1971 tokens above the bracket."""
    probs = renorms.misleading_probs(2000)[:1].repeat(3, 1)
    check(make(probs, [1970, 1971, 1972], device), "just enough above")


def test_flat_rows_have_few_candidates(device, monkeypatch):
    renorms.check_flat_rows(monkeypatch, PATH, make(renorms.random_probs(2, 32768, scale=2e-5), 20000, device))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128256, 262144, 128255])
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_large_rows(vocab_size, scale, device):
    top_k = torch.tensor([1, 2, 20, 50, 1000, 5000, 60000, vocab_size - 1]).repeat(8)
    renorms.check(PATH, make(renorms.random_probs(64, vocab_size, scale=scale), top_k, device), f"scale={scale}")


@pytest.mark.gpu
def test_large_peculiar_rows(device):
    values = make(renorms.large_peculiar_probs(), [50, 50, 50, 50, 5000, 70000, 3000], device)
    renorms.check(PATH, values, "peculiar")
