"""Names of a module that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(names: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a module.

    names: the module's `globals()`. homes: where each name is, as `.ops.registry:OPS`; `.raw:` is a module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = import_module(home, names["__package__"])
        names[name] = value = getattr(value, attribute) if attribute else value
        return value

    return get, lambda: sorted({*names, *homes})
