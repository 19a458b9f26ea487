"""Names of a module that are imported when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a module, given by its `__name__`.
    homes: where each name is, as `.ops.registry:OPS`; `.raw:` is a module itself."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = import_module(home, sys.modules[module].__package__)
        value = getattr(value, attribute) if attribute else value
        setattr(sys.modules[module], name, value)  # so that this is not asked again
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *homes})
