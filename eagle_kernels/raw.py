"""The bare launchers: no dispatcher between the caller and the kernel, GPU tensors only (or Triton's interpreter)."""

from .ops.tree.build_tree import build_tree

__all__ = ["build_tree"]
