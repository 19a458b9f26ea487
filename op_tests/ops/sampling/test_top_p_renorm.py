"""top_p_renorm: the reference's bits, an oracle that sorts, edges on a grid, rows that mislead the sample."""

import pytest
import torch

from op_tests.harness import sweep, to_device

from . import renorms

PATH = "sampling.top_p_renorm"
JUST_BELOW_ONE = 1 - 2.0**-24


def make(probs, top_p, device="cpu"):
    top_p = torch.as_tensor(top_p, dtype=torch.float32).expand(len(probs)).contiguous()
    return to_device({"probs": probs, "top_p": top_p}, device)


def ahead_of_time_cases():
    yield "fp32", make(renorms.random_probs(2, 512), [0.5, 1.0])
    yield "bf16, odd size", make(renorms.random_probs(2, 301, dtype=torch.bfloat16), [0.5, 1.0])
    yield "fp16, V=128256", make(torch.rand(1, 128256).half(), 0.9)


size_sweep = sweep(lambda num_rows: make(torch.rand(num_rows, 1000), 0.9))


def check(values, case):
    """As the reference, and as an oracle that sorts."""
    actual = renorms.check(PATH, values, case)
    top_p = values["top_p"].tolist()

    def keeps(index, row):
        if not top_p[index] < 1:
            return row > 0
        ordered = row.sort(descending=True).values
        mass = ordered.cumsum(0)
        return row >= ordered[int((mass >= top_p[index] * mass[-1]).to(torch.int32).argmax())]

    renorms.assert_as_oracle("top_p_renorm", case, values["probs"], actual, keeps)
    return actual


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1025])
def test_matches_reference(vocab_size, device):
    check(make(renorms.random_probs(4, vocab_size), [0.0, 0.3, 0.9, 2.0], device), f"V={vocab_size}")


def test_edges_on_a_grid_are_exact(device):
    """1/2, 1/4, 1/8, 1/8 in some order and unit: a sum that is just enough is enough, ties stay together."""
    above = 2.0**-23
    top_p = [-1.0, 1e-30, 0.5, 0.5 + above, 0.75, 0.75 + above, JUST_BELOW_ONE, 1.0, float("nan")]
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]]) * (3 * 2.0**-20) ** (torch.arange(9)[:, None] % 2)
    kept = (check(make(probs, top_p, device), "grid") > 0).sum(1)
    assert kept.tolist() == [1, 1, 1, 2, 2, 4, 4, 4, 4]


def test_a_sum_that_lacks_the_least_is_not_enough(device):
    """3/4 of 1, and 3/4 of 1 + 2^-41, of which the first token has a little less."""
    probs = torch.tensor([[0.25, 0.0, 0.75], [0.25, 2.0**-41, 0.75]])
    kept = (check(make(probs, 0.75, device), "less than a unit") > 0).sum(1)
    assert kept.tolist() == [1, 2]


def test_edges_on_a_grid_are_exact_in_rows_of_several_slices(device):
    """Four levels of a quarter of the mass each, by hand: where the bracket meets an edge exactly, too."""
    levels = torch.tensor([8.0, 4.0, 2.0, 1.0]).repeat_interleave(torch.tensor([600, 1200, 2400, 4800])) * 2.0**-12
    above = 1.0 + 2.0**-23
    top_p = [0.25, 0.25 * above, 0.5, 0.5 * above, 0.75, 0.75 * above]
    probs = torch.stack([levels[torch.randperm(len(levels))] for _ in top_p])
    kept = (check(make(probs, top_p, device), "four levels") > 0).sum(1)
    assert kept.tolist() == [600, 1800, 1800, 4200, 4200, 9000]


def test_ties_at_the_edge_all_stay(device):
    check(make(renorms.dyadic_probs(3, 1025), [0.25, 0.5, 0.984375], device), "dyadic grid")


def test_nearly_all(device):
    """The largest float below 1 leaves out what 2^-24 of the sum cannot tell; only the reference rounds as we do."""
    values = make(renorms.random_probs(1, 1025, scale=4.0), JUST_BELOW_ONE, device)
    kept = (renorms.check(PATH, values, "nearly all") > 0).sum(1)
    assert (kept > 500).all() and (kept < 1025).all()


def test_rows_that_no_bracket_holds(device):
    """All equal, and samples that lie: the edge is searched among all candidates, and in the row itself."""
    probs = torch.cat([torch.full((1, renorms.LONG), 0.25), renorms.misleading_probs(renorms.LONG)])
    check(make(probs, 0.5, device), "lying samples")


def test_flat_rows_have_few_candidates(device, monkeypatch):
    renorms.check_flat_rows(monkeypatch, PATH, make(renorms.random_probs(2, 32768, scale=2e-5), 0.95, device))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128256, 262144, 128255])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 6.0])
def test_large_rows(vocab_size, scale, device):
    top_p = torch.tensor([0.0, 0.01, 0.5, 0.9, 0.95, 0.9999, JUST_BELOW_ONE, 1.0]).repeat(8)
    renorms.check(PATH, make(renorms.random_probs(64, vocab_size, scale=scale), top_p, device), f"scale={scale}")


@pytest.mark.gpu
def test_large_peculiar_rows(device):
    values = make(renorms.large_peculiar_probs(), [0.5, 0.5, 0.9, 0.9, 0.3, 0.999, 0.999], device)
    renorms.check(PATH, values, "peculiar")
