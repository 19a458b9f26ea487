"""Questions about values that callers and files hand in."""

from __future__ import annotations

from typing import Any


def is_integer(value: Any) -> bool:
    """Whether it is an int and means a number: Python counts True and False among its ints."""
    return isinstance(value, int) and not isinstance(value, bool)
