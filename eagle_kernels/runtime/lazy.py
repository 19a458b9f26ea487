"""Names of a module that are imported when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import resolve_name
from itertools import accumulate
from types import ModuleType
from typing import Any


def import_in_order(name: str, package: str | None) -> ModuleType:
    """Imports a module like `importlib.import_module`, but the packages around it first.

    Python takes the lock of the module and then waits for that of its package, which another thread may hold that
    imports the package, and so the module: one of the two would end with a deadlock that Python detects.
    """
    *packages, module = accumulate(resolve_name(name, package).split("."), "{}.{}".format)
    for each in packages:
        import_module(each)
    return import_module(module)


def lazily(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a module, given by its `__name__`.
    homes: where each name is, as `.ops.registry:OPS`; `.raw:` is a module itself."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = import_in_order(home, sys.modules[module].__package__)
        value = getattr(value, attribute) if attribute else value
        setattr(sys.modules[module], name, value)  # so that this is not asked again
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *homes})
