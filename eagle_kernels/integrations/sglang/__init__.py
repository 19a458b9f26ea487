"""The plug-in for SGLang: its speculative decoding and attention on our kernels. README.md says how to turn it on."""

from .plugin import register

__all__ = ["register"]
