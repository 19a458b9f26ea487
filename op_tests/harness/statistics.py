"""One chi-square test, one threshold: a sound sampler fails one run in a million, and seeds are fixed anyway.

A million of all laws together, where a test has several and says how many.
"""

import math

import torch

FALSE_ALARM = 1e-6


def assert_follows_law(samples: torch.Tensor, law: torch.Tensor, false_alarm: float = FALSE_ALARM) -> None:
    """Integer samples [n] against the probabilities `law` [m]; an outcome of probability 0 must not occur."""
    counts = torch.bincount(samples.flatten(), minlength=len(law)).double()
    assert len(counts) == len(law), f"outcome {len(counts) - 1} lies outside the law's {len(law)}"
    impossible = counts[law == 0]
    assert impossible.sum() == 0, f"{int(impossible.sum())} samples of probability 0"
    expected = law[law > 0].double() * counts.sum()
    observed = counts[law > 0]
    # outcomes too rare for the chi-square approximation are pooled
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    tail = _chi_square_tail(statistic, degrees)
    assert tail > false_alarm, f"chi-square {statistic:.1f} with {degrees} degrees of freedom: p = {tail:.1e}"


def _chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` > statistic)."""
    if degrees == 0:
        return 1.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64))
    return float(tail) if math.isfinite(statistic) else 0.0
