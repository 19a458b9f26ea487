"""What the server is timed with, and the systems that are compared."""

from __future__ import annotations

from typing import NamedTuple

STOCK = {"sglang+flashinfer": "flashinfer", "sglang+triton": "triton"}  # with their attention backends
PLUGGED, OWN = "sglang+eagle_kernels", "eagle_kernels"
SYSTEMS = (*STOCK, PLUGGED, OWN)

TREE_SAMPLING = ((0.0, 1.0), (0.8, 0.95))  # temperature, top-p


class Case(NamedTuple):
    """What one engine is measured with. tree: topk, steps, nodes; accept: mean tokens of a step that are simulated."""

    name: str
    batches: tuple[int, ...]
    tree: tuple[int, int, int] | None = None
    accept: float | None = None
    prompt_tokens: int = 512
    sampling: tuple[tuple[float, float], ...] = ((0.0, 1.0),)


CASES = (
    Case("plain", (1, 8, 32)),
    Case("8/5/64", (1,), (8, 5, 64), 4.0, sampling=TREE_SAMPLING),
    Case("4/3/8", (32,), (4, 3, 8), 2.5, sampling=TREE_SAMPLING),
    Case("4/4/16", (8,), (4, 4, 16), 2.5, prompt_tokens=8192, sampling=TREE_SAMPLING),
)
