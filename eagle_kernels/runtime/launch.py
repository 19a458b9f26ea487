"""Launching a kernel: the one way from Python to the GPU (or to Triton's interpreter)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch

from . import language

_interceptor: Callable | None = None


def launch(op: str, kernel, grid: tuple[int, ...], **arguments) -> None:
    """Runs `kernel` over `grid` on the device of its first tensor argument, whatever device is current.

    An empty grid launches nothing (B = 0 is a valid batch). Raises RuntimeError, naming `op`, where the machine cannot
    run Triton kernels on that device.
    """
    if _interceptor is not None:
        _interceptor(op, kernel, grid, arguments)
        return
    if 0 in grid:
        return
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    if not language.AVAILABLE:
        raise RuntimeError(f"eagle_kernels.{op}: the triton backend needs the package triton, which is not installed")
    if device.type == "cpu":
        if not is_interpreting():
            raise RuntimeError(
                f"eagle_kernels.{op}: the triton backend cannot run on cpu tensors; move them to a GPU, set "
                "TRITON_INTERPRET=1 before the first import, or use EAGLE_KERNELS_BACKEND=reference"
            )
        kernel[grid](**arguments)
    else:
        with torch.cuda.device(device):
            kernel[grid](**arguments)


def is_interpreting() -> bool:
    """Whether kernels run through Triton's interpreter; read as Triton reads it when it decorates a kernel."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@contextlib.contextmanager
def intercept(function: Callable):
    """Hands every launch to `function(op, kernel, grid, arguments)` instead of running it; for the test harness."""
    global _interceptor
    before, _interceptor = _interceptor, function
    try:
        yield
    finally:
        _interceptor = before
