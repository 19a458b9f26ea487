"""Choosing a tuning row. Rows live in the op files, keyed by architecture, with a mandatory `"default"`.

There is no runtime autotuning: a first call must not stall, and graph capture must not measure.
"""

from __future__ import annotations

import torch

from .target import architecture


def row(table: dict[str, dict], device: torch.device) -> dict:
    """The row of `device`'s architecture, or the default."""
    return table.get(architecture(device), table["default"])
