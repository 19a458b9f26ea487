"""Deprecated since 0.2, and removed in 0.3: `eagle_kernels.tools.trees.view` has these names."""

import warnings
from importlib import import_module


def __getattr__(name: str) -> object:
    value = getattr(import_module("eagle_kernels.tools.trees.view"), name)
    warnings.warn(f"{__name__} ends with 0.3; use eagle_kernels.tools.trees.view", DeprecationWarning, stacklevel=2)
    return value
