"""Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference, and an engine.

Start with the repository's README.md, whose examples run as is. `help(eagle_kernels.verify_tree)` shows the arguments,
shapes and results of that op; the same works for every name in `eagle_kernels.ops.OPS`.
`help(eagle_kernels.EAGLEInference)` shows how to generate with a model.
"""

from .runtime import interrupts  # isort: skip  # first, as the others take a second
from .ops.registry import OPS
from .runtime.lazy import lazily
from .runtime.version import __version__

if not interrupts.IS_COMMAND:  # which has no program that looks ops up by name, and must not wait for torch to say so
    from .ops import operators

    del operators

_HOMES = {
    "EAGLEConfig": ".engine:EAGLEConfig",
    "EAGLEInference": ".engine:EAGLEInference",
    "SamplingParams": ".engine:SamplingParams",
    "TreeMaskMode": ".ops:TreeMaskMode",
    "cache_addresses": ".ops:cache_addresses",
    "generate_token_bitmask": ".ops:generate_token_bitmask",
    "raw": ".raw:",
    "reference": ".reference:",
    "verify_tree": ".ops:verify_tree",
    **{name: f".ops:{name}" for name in OPS},
}
__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = lazily(__name__, {**_HOMES, "engine": ".engine:", "types": ".types:"})
del interrupts, lazily
