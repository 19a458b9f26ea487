"""Fixtures of the tests of attention over latents."""

from ..attention.conftest import sums_in_order

__all__ = ["sums_in_order"]
