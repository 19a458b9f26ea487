"""Triton's interpreter in half of the time: triton.language is patched once a launch, not at every call in it.

The interpreter replaces the functions of triton.language by its own where a launch begins and puts them back where it
ends. It does so again at every call of a device function, where all is in place already, and looks at some hundred
members each time: more than half of what a test of a kernel takes.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

_NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)


def patch_once_a_launch() -> None:
    """For the rest of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    patched: set[str] = set()  # since the launch began

    @functools.cache
    def names_of(fn) -> set[str]:
        """What _patch_lang would patch for this function: it takes what the function's module has imported."""
        modules = {"tl": tl, "core": tl.core}
        return {name for name, lang in modules.items() if any(value is lang for value in fn.__globals__.values())}

    def patch(fn):
        if patched and names_of(fn) <= patched:
            return _NOTHING_TO_RESTORE
        is_launch, scope = not patched, patch_lang(fn)
        patched.update(names_of(fn))
        if is_launch and scope is not None:  # None: a Triton that leaves everything patched
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch
