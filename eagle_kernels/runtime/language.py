"""`triton` and `tl`, or stand-ins where triton is not installed.

With the stand-ins every module still imports, argument checks and references work, and only a launch fails, with one
line that says what is missing (`launch.py`).
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    class _StandIn:
        """Answers every attribute and every call with itself, so that module-level uses of triton do nothing."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return self

        def next_power_of_2(self, number: int) -> int:  # launchers compute sizes with these before they launch
            return 1 << max(number - 1, 0).bit_length()

        def cdiv(self, number: int, divisor: int) -> int:
            return -(-number // divisor)

    triton = tl = _StandIn()

__all__ = ["AVAILABLE", "tl", "triton"]
