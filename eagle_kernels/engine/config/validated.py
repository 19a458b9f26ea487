"""A dataclass that checks its own fields, and says the field, the rule and the value in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from ...runtime.values import is_integer


def checked(default: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
    """Defines a field with a rule; None need not keep it where it is the default."""
    return field(default=default, metadata={"rule": rule, "holds": holds})


def limited(default: float | None, least: int, most: int | None = None) -> Any:
    """Defines a field with a least value, and perhaps a largest one."""
    if most is None:
        return checked(default, f"be at least {least}", lambda value: least <= value)
    return checked(default, f"lie in {least}..{most}", lambda value: least <= value <= most)


def one_of(*choices: str) -> Any:
    """Defines a field with some choices, of which the first one is the default."""
    return checked(choices[0], f"be one of {list(choices)}", lambda value: value in choices)


def is_number(value: Any) -> bool:
    """Returns whether a value is an int or a float, and means a number."""
    return is_integer(value) or isinstance(value, float)


class Validated:
    """Checks the fields of a configuration: numbers by their annotation, others by what `checked` says of them."""

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"EAGLEConfig: {name} must {rule}, got {getattr(self, name)!r}")

    def _check_each_field(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if each.type.startswith("int"):
                self._require(is_integer(value), name, "be an int or None" if each.default is None else "be an int")
            elif each.type.startswith("float"):
                self._require(is_number(value), name, "be a number")
                self._require(-math.inf < value < math.inf, name, "be a finite number")
            if each.metadata:
                self._require(each.metadata["holds"](value), name, each.metadata["rule"])
