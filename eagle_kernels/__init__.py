"""eagle_kernels: Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference."""

from . import raw, reference
from .ops import build_tree

__all__ = ["build_tree", "raw", "reference"]
