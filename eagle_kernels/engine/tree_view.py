"""Deprecated since 0.2, will be removed in 0.3: use `eagle_kernels.tools.trees.view`."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    value = getattr(import_module("eagle_kernels.tools.trees.view"), name)
    text = "eagle_kernels.engine.tree_view is now eagle_kernels.tools.trees.view, and goes in 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return value
