"""Functions of a framework that a plug-in hooks: what is called around them, and whether it is in its place."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .parts import Parts


@dataclass(frozen=True)
class Hook:
    """A function of a framework, and what is called around it: it gets the original first, then the original's
    arguments. part: empty for guards, which are always on. ours: module and name. parameters: names that ours relies
    on, in this order at the front of the framework's signature."""

    part: str
    target: str
    ours: str
    parameters: tuple[str, ...]

    def function(self) -> Callable:
        """Imports what takes the place of the framework's function."""
        module, name = self.ours.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)

    def fault(self) -> str | None:
        """Says what is wrong with the target in the installed framework; None if it is as expected."""
        try:
            function = resolve(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} does not exist ({error})"
        function = inspect.unwrap(getattr(function, "__func__", function))  # also of a method of the class
        found = tuple(inspect.signature(function).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {', '.join(found)}; expected first {', '.join(self.parameters)}"
        return None


def hook_of(package: str) -> Callable[[str, str, str, tuple[str, ...]], Hook]:
    """Returns what makes the hooks of a plug-in, whose modules are named from its package on."""
    return lambda part, target, ours, parameters: Hook(part, target, f"{package}.{ours}", parameters)


def resolve(target: str):
    """Imports a dotted path; raises ImportError or AttributeError where it does not exist."""
    names = target.split(".")
    for size in range(len(names) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(names[:size]))
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise  # the module is there, and something that it needs is not
            continue
        for name in names[size:]:
            value = getattr(value, name)
        return value
    raise ImportError(f"no module of {target}")


def marked(hook: Hook, parts: Parts) -> Callable:
    """Returns what is called around the framework's function: ours, or the original alone while the part is off.
    Ours is imported at its first call. The mark tells `fault_in_place` that it is there. What torch.compile traces
    keeps the framework's function, which it knows how to fuse."""
    ours = None

    def call(original, *args, **kwargs):
        nonlocal ours
        if hook.part and (not parts.is_on(hook.part) or torch.compiler.is_compiling()):
            return original(*args, **kwargs)
        if ours is None:
            ours = hook.function()
            parts.note_use(hook.part)
        return ours(original, *args, **kwargs)

    call.eagle_kernels_hook = hook.target
    return call


def fault_in_place(hook: Hook, allowed_by: str) -> str | None:
    """Says why ours is not called around the framework's function; None where it is.
    allowed_by: the framework's variable that may leave the plug-in out."""
    fault = hook.fault()
    if fault is not None:
        return fault
    function = resolve(hook.target)
    while function is not None:  # wrappers of others may be around ours
        if getattr(function, "eagle_kernels_hook", None) == hook.target:
            return None
        cells = getattr(function, "__closure__", None) or ()
        if any(getattr(cell.cell_contents, "eagle_kernels_hook", None) == hook.target for cell in cells):
            return None
        function = getattr(function, "__wrapped__", None)
    return f"{hook.target} is not hooked; is the plug-in filtered out by {allowed_by}?"
