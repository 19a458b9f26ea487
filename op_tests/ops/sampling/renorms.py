"""What the tests of the three renormalising filters share: rows of every kind, and an oracle that sorts in float64."""

import torch

from eagle_kernels.ops.sampling.shared import renorm_steps
from op_tests.harness import assert_close, assert_equal, check_operation

# a row in several slices, and of more candidates than one program holds
LONG = 9000


def random_probs(num_rows: int, vocab_size: int, *, scale: float = 2.0, dtype=torch.float32) -> torch.Tensor:
    """Softmax of normal logits with this standard deviation."""
    return torch.softmax(scale * torch.randn(num_rows, vocab_size), dim=1).to(dtype)


def dyadic_probs(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Few distinct values on a coarse grid: ties everywhere, sums without rounding, and not 1."""
    return torch.randint(0, 9, (num_rows, vocab_size)) * 2.0**-12


def misleading_probs(vocab_size: int) -> torch.Tensor:
    """Two rows whose samples (one id in 32) tell nothing of the rest: light where all else is heavy, and reversed."""
    chunk = torch.arange(vocab_size) // 32
    is_sampled = torch.arange(vocab_size) % 32 == (chunk * 11 + 5) % 32
    heavy, light = 1.0 + torch.rand(2, vocab_size), 1e-3 * torch.rand(2, vocab_size)
    return torch.where(torch.stack([~is_sampled, is_sampled]), heavy, light) / vocab_size


def large_peculiar_probs(vocab_size: int = 128256) -> torch.Tensor:
    """Rows that mislead the sample (the first two and the last two), uniform, sparse and of few distinct values."""
    lying = misleading_probs(vocab_size)
    sparse = torch.zeros(1, vocab_size)
    sparse[0, ::9973] = 0.5
    coarse = torch.rand(1, vocab_size).bfloat16().float()
    return torch.cat([lying, torch.full((1, vocab_size), 0.25), sparse, coarse, lying])


def spoil(probs: torch.Tensor) -> None:
    """Makes rows 1 and 2 bad: all of the first, entries of the second."""
    nan, inf = float("nan"), float("inf")
    probs[1] = torch.tensor([nan, inf, -inf, -1.0]).repeat(len(probs[1]))[: len(probs[1])]
    probs[2, 5::3] = probs[1, 5::3]


def check(path: str, values: dict, case: str) -> torch.Tensor:
    """Launcher and reference agree in every bit; returns what they agree on."""
    return check_operation(path, values, case=case)[0]


def assert_as_oracle(op: str, case: str, probs: torch.Tensor, actual: torch.Tensor, keeps) -> None:
    """Support exactly, values closely: `keeps(row index, float64 row)` tells which tokens of a row stay."""
    clean = torch.nan_to_num(probs.cpu().double(), nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)
    for index, row in enumerate(clean):
        keep = keeps(index, row) & (row > 0)
        want = torch.where(keep, row / torch.where(keep, row, 0.0).sum().clamp(min=1e-300), 0.0)
        assert_equal(op, f"{case}, row {index}", "support", actual[index].cpu() > 0, keep)
        assert_close(op, f"{case}, row {index}", "values", actual[index].cpu(), want)


def check_flat_rows(monkeypatch, path: str, values: dict) -> None:
    """All of a row lies within a thousandth of its largest value; the bracket holds a part of it even so."""
    states = []

    def noting(op, kernel, grid, **arguments):
        states.append(arguments["scratch"].state)
        return launch(op, kernel, grid, **arguments)

    launch = renorm_steps.launch
    monkeypatch.setattr(renorm_steps, "launch", noting)
    check(path, values, "flat")
    num_candidates = states[-1][:, int(renorm_steps.NUM_CANDIDATES.value)]
    assert int(num_candidates.min()) > 0 and int(num_candidates.max()) < values["probs"].shape[1] // 2, num_candidates
