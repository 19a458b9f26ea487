"""Renormalising filtered probabilities with sums of whole numbers, which do not depend on the order of summands."""

import torch

# Masses are in units of 2^-40 of the power of two at or below the row's largest probability.
MASS_BITS = 40
# The smallest exponent that fp32 numbers in steps of 2^-23 of their power of two have; subnormal numbers share it.
_SMALLEST_EXPONENT = -126


def clean_probs(probs: torch.Tensor) -> torch.Tensor:
    """Returns probabilities in fp32, 0 for NaN, infinite and negative entries."""
    probs = probs.to(torch.float32)
    return torch.where((probs > 0) & (probs < float("inf")), probs, 0.0)


def fixed_point_masses(probs: torch.Tensor) -> torch.Tensor:
    """Returns clean probabilities in units of 2^-40 of their row's largest power of two, rounded down: int64 [R, V]."""
    return (probs.double() / _unit(probs)).floor().to(torch.int64)


def kept_and_renormalised(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Returns kept clean probabilities divided by their mass, 0 elsewhere: fp32."""
    mass = torch.where(keep, fixed_point_masses(probs), 0).sum(dim=1, keepdim=True)
    divisor = (mass.double() * _unit(probs)).float()
    return torch.where(keep & (probs > 0), probs / torch.where(mass > 0, divisor, 1.0), 0.0)


def _unit(probs: torch.Tensor) -> torch.Tensor:
    """Returns what a mass of 1 is, float64 [R, 1]."""
    largest = probs.double().amax(dim=1, keepdim=True)
    # the mantissa of frexp lies in 0.5 .. 1; a row of zeros has any unit
    exponent = (torch.frexp(largest).exponent - 1).clamp(min=_SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent - MASS_BITS)
