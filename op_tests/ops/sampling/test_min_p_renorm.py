"""min_p_renorm: the reference's bits, an oracle in float64, edges that round, peculiar rows."""

import pytest
import torch

from op_tests.harness import sweep, to_device

from . import renorms

PATH = "sampling.min_p_renorm"


def make(probs, min_p, device="cpu"):
    min_p = torch.as_tensor(min_p, dtype=torch.float32).expand(len(probs)).contiguous()
    return to_device({"probs": probs, "min_p": min_p}, device)


def ahead_of_time_cases():
    yield "fp32", make(renorms.random_probs(2, 512), [0.1, 0.0])
    yield "bf16, odd size", make(renorms.random_probs(2, 301, dtype=torch.bfloat16), [0.1, 0.0])
    yield "fp16, V=128256", make(torch.rand(1, 128256).half(), 0.1)


size_sweep = sweep(lambda num_rows: make(torch.rand(num_rows, 1000), 0.1))


def check(values, case):
    """As the reference, and as an oracle that rounds the edge once, from float64 to fp32."""
    actual = renorms.check(PATH, values, case)
    min_p = values["min_p"].tolist()

    def keeps(index, row):
        if not min_p[index] > 0:
            return row > 0
        return row >= (min(min_p[index], 1.0) * row.max()).float().double()

    renorms.assert_as_oracle("min_p_renorm", case, values["probs"], actual, keeps)
    return actual


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1025, renorms.LONG])
def test_matches_reference(vocab_size, device):
    min_p = [0.0, -1.0, 1e-3, 0.1, 0.9, 1.0, 2.0, float("nan"), float("inf")]
    check(make(renorms.random_probs(9, vocab_size), min_p, device), f"V={vocab_size}")


def test_edges_on_a_grid_are_exact(device):
    above = 2.0**-23
    min_p = [0.0, 1e-45, 0.25, 0.25 + above, 0.5, 0.5 + above, 1.0, 2.0]
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]]) * (3 * 2.0**-20) ** (torch.arange(8)[:, None] % 2)
    kept = (check(make(probs, min_p, device), "grid") > 0).sum(1)
    assert kept.tolist() == [4, 4, 4, 2, 2, 1, 1, 1]


def test_the_edge_is_rounded_to_nearest(device):
    """0.7 times 16 values, rounded up or down: the float that it gives stays, the one below goes."""
    largest = torch.rand(16, 1) + 0.5
    edge = (torch.tensor(0.7).double() * largest.double()).float()
    below = torch.nextafter(edge, torch.zeros_like(edge))
    kept = check(make(torch.cat([largest, edge, below], dim=1), 0.7, device), "edge") > 0
    assert kept.tolist() == [[True, True, False]] * 16


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128256, 262144, 128255])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_large_rows(vocab_size, scale, device):
    min_p = torch.tensor([0.0, 1e-6, 1e-3, 0.02, 0.1, 0.5, 1.0, 2.0]).repeat(8)
    renorms.check(PATH, make(renorms.random_probs(64, vocab_size, scale=scale), min_p, device), f"scale={scale}")
