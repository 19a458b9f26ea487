"""Rotary tables for the tests of rope and write_kv."""

import torch


def make_tables(num_positions: int, rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_positions, rotary_dim / 2] of the usual frequencies, in float64 before they are rounded."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * 10000.0**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)
