"""What `python -m eagle_kernels env` says about a plug-in and its framework, which is read and not imported."""

import importlib.metadata
from collections.abc import Callable
from types import ModuleType

from .contract import Entry, differences, of_hook, short
from .sources import Sources
from .versions import is_first, is_supported, spans

Row = tuple[str, str]


def rows(
    package: str,
    hooks: ModuleType,
    entries: tuple[Entry, ...],
    left_out: str | None,
    more: Callable[[Sources], list[Row]] = lambda sources: [],
) -> list[Row]:
    """Returns the installed version, each hook, more, and what else differs from what the plug-in relies on.

    hooks: a plug-in's module with TESTED, GUARDS and HOOKS. left_out: says why the framework does not load the plug-in.
    This works on a machine on which the framework would not start.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return [(package, "not installed")]
    place = f"{version}, outside of"
    if is_supported(version, hooks.TESTED):
        place = f"{version} ({'run' if is_first(version, hooks.TESTED) else 'checked, not run'}), within"
    found = [(package, f"{place} {spans(hooks.TESTED)}, which the plug-in was checked with")]
    if left_out:
        found.append((f"{package} plug-in", left_out))
    sources = Sources.installed(package)
    if sources is None:
        return [*found, (f"{package} hooks", f"Python finds no package {package}")]
    for hook in (*hooks.GUARDS, *hooks.HOOKS):
        text = "; ".join(differences(sources, (of_hook(hook),))) or f"found ({hook.part or 'guard'})"
        found.append((f"{package} hook {short(hook.target)}", text))
    differs = [(f"{package} differs", fault) for fault in differences(sources, entries)]
    return [*found, *more(sources), *differs]
