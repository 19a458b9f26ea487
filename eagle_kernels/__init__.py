"""Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference, and an engine.

Start with README.md of the repository, whose examples run as they stand. `help(eagle_kernels.verify_tree)` tells the
arguments, shapes and results of an op, as it does for every name in `eagle_kernels.ops.OPS`.
`help(eagle_kernels.EAGLEInference)` tells how a model generates.
"""

from .runtime import interrupts  # isort: skip  # first, as the others take seconds
from . import ops, raw, reference
from .engine import EAGLEConfig, EAGLEInference, SamplingParams
from .ops import TreeMaskMode, generate_token_bitmask, verify_tree
from .runtime.version import __version__

del interrupts
globals().update({name: getattr(ops, name) for name in ops.OPS})
__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "SamplingParams",
    "TreeMaskMode",
    "__version__",
    "generate_token_bitmask",
    "raw",
    "reference",
    "verify_tree",
    *ops.OPS,
]
