"""Choosing a tuning row. Rows live in the op files, keyed by architecture, with a mandatory `"default"`. There is no
runtime autotuning: a first call must not stall, and graph capture must not measure."""

from typing import Any

import torch

from .target import architecture


def row(table: dict[str, Any], device: torch.device) -> Any:
    """Returns the row of `device`'s architecture, or the default."""
    return table.get(architecture(device), table["default"])


def compiler_options(tuned: dict) -> dict:
    """Returns the part of a row that is not for the op but for Triton."""
    return {name: tuned[name] for name in ("num_warps", "num_stages", "maxnreg") if name in tuned}
