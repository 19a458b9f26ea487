"""Dataclasses whose fields carry their rules; an error says the field, the rule and the value in one line."""

import sys
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from .values import is_integer, scalar, shown

# what a value must do, in words, and whether it does
Rule = tuple[str, Callable[[Any], bool]]
# what the tensors that hold such numbers can hold
IN_64_BITS: Rule = ("fit in 64 bits", lambda value: -(2**63) <= value < 2**63)


def checked(default: Any, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field with rules; None need not keep them where it is the default. off: other words for the default."""
    return field(default=default, metadata={"rules": rules, "off": off})


def same_as(record: type, name: str) -> Any:
    """Defines a field with the default and the rules that another dataclass has for it."""
    each = next(each for each in fields(record) if each.name == name)
    return field(default=each.default, metadata=each.metadata)


def integer(default: int | None, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field of ints, with further rules."""
    is_int: Rule = ("be an int or None" if default is None else "be an int", is_integer)
    return checked(default, is_int, *rules, IN_64_BITS, off=off)


def number(default: float | None, *rules: Rule, off: tuple = ()) -> Any:
    """Defines a field of finite numbers, with further rules."""
    is_finite: Rule = ("be a finite number", lambda value: abs(value) <= sys.float_info.max)
    return checked(default, ("be a number", is_number), is_finite, *rules, off=off)


def one_of(*choices: str) -> Any:
    """Defines a field with some choices, of which the first one is the default."""
    return checked(
        choices[0], (f"be one of {list(choices)}", lambda value: isinstance(value, str) and value in choices)
    )


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
            raise ValueError(f"{type(self).__name__}: {name} must {rule}, got {shown(getattr(self, name))}")

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
