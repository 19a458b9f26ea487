"""Questions about values that callers, files and other libraries hand in."""

from __future__ import annotations

from typing import Any


def is_integer(value: Any) -> bool:
    """Whether it is an int and means a number: Python counts True and False among its ints."""
    return isinstance(value, int) and not isinstance(value, bool)


def first_line(error: Exception) -> str:
    """What an error says, in one line; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
