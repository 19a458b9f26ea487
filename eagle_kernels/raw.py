"""The bare launchers: no dispatcher between the caller and the kernel, GPU tensors only (or Triton's interpreter)."""

from .ops.registry import OPS
from .runtime.lazy import lazily

__all__ = sorted(OPS)
__getattr__, __dir__ = lazily(__name__, {name: f".ops.{path}:{name}" for name, path in OPS.items()})
