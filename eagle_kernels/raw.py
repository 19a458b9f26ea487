"""The bare launchers: no dispatcher between the caller and the kernel, GPU tensors only (or Triton's interpreter)."""

from importlib import import_module

from .ops.registry import OPS

globals().update({name: getattr(import_module(f".ops.{path}", __package__), name) for name, path in OPS.items()})
__all__ = sorted(OPS)
