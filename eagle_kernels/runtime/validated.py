"""Dataclasses whose fields carry their rules; an error says the field, the rule and the value in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from .values import is_integer, scalar

# what a value must do, in words, and whether it does
Rule = tuple[str, Callable[[Any], bool]]


def checked(default: Any, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field with rules; None need not keep them where it is the default. off: other words for the default."""
    return field(default=default, metadata={"rules": rules, "off": off})


def integer(default: int | None, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field of ints, with further rules."""
    return checked(default, ("be an int or None" if default is None else "be an int", is_integer), *rules, off=off)


def number(default: float | None, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field of finite numbers, with further rules."""
    is_finite: Rule = ("be a finite number", lambda value: -math.inf < value < math.inf)
    return checked(default, ("be a number", is_number), is_finite, *rules, off=off)


def one_of(*choices: str) -> Any:
    """Defines a field with some choices, of which the first one is the default."""
    return checked(choices[0], (f"be one of {list(choices)}", lambda value: value in choices))


def at_least(least: float) -> Rule:
    return f"be at least {least}", lambda value: value >= least


def above(bound: float) -> Rule:
    return f"be above {bound}", lambda value: value > bound


def between(least: float, most: float) -> Rule:
    return f"lie in {least}..{most}", lambda value: least <= value <= most


def is_number(value: Any) -> bool:
    """Returns whether a value is an int or a float, and means a number."""
    return is_integer(value) or isinstance(value, float)


class Validated:
    """Checks the fields of a dataclass."""

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {name} must {rule}, got {getattr(self, name)!r}")

    def _check_each_field(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            value = scalar(given)
            if any(type(value) is type(word) and value == word for word in each.metadata.get("off", ())):
                value = each.default
            if value is not given:
                object.__setattr__(self, each.name, value)
            if value is not None or each.default is not None:
                for rule, holds in each.metadata.get("rules", ()):
                    self._require(holds(value), each.name, rule)
