"""The plug-in for vLLM: its attention, verification and drafting on our kernels. README.md says how to turn it on."""

from .plugin import register

__all__ = ["register"]
