"""The same numbers twice: seeds of all generators, and torch set to repeat itself."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

# what cuBLAS needs to repeat itself; it is read when its first handle is made
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_seed(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, on all GPUs. With `seeds` the engine's noise depends on none of
    them."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"set_seed: seed must be an int in 0..2^32 - 1, which all generators take, got {seed!r}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def deterministic(seed: int | None = None, *, warn_only: bool = False) -> Iterator[None]:
    """Makes torch's operators give the same bits every time, without rounded fp32 products; after it all is as before,
    generators aside.

    seed       None: generators stay where they are
    warn_only  let an operator that cannot repeat itself run, and say so; else it raises
    """
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic
    flags = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    before = (cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory, os.environ.get(_WORKSPACE))
    precision = torch.get_float32_matmul_precision()
    try:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = True, False
        # which would cost a launch for every buffer, and no op of ours reads what it has not written
        fill.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("highest")
        if seed is not None:
            set_seed(seed)
        yield
    finally:
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
        cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory, workspace = before
        torch.set_float32_matmul_precision(precision)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
