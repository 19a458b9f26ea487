"""Checks of fields that say the field, the rule and the value in one line."""

from __future__ import annotations

import math

from ...runtime.values import is_integer


class Validated:
    """A configuration that checks its own fields."""

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"EAGLEConfig: {name} must {rule}, got {getattr(self, name)!r}")

    def _require_integer(
        self, name: str, low: int | None = None, high: int | None = None, *, is_optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and is_optional:
            return
        self._require(is_integer(value), name, "be an int or None" if is_optional else "be an int")
        if high is not None:
            self._require(low <= value <= high, name, f"lie in {low}..{high}")
        elif low is not None:
            self._require(low <= value, name, f"be at least {low}")

    def _require_number(self, name: str) -> None:
        value = getattr(self, name)
        self._require(is_integer(value) or isinstance(value, float), name, "be a number")
        self._require(-math.inf < value < math.inf, name, "be a finite number")
