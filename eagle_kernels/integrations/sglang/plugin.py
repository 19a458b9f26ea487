"""Registers the plug-in with SGLang: the entry point of the group `sglang.srt.plugins`."""

import importlib.metadata
import logging
import os
import re

import torch

from . import hooks
from .parts import NAME, asked_by_variable, is_matching, is_on, note_use, preset

logger = logging.getLogger(__name__)
FORCE = "EAGLE_KERNELS_SGLANG_FORCE"


def register() -> None:
    """Registers the attention backend `eagle_kernels` and the hooks of all parts, which do nothing until asked for.
    SGLang calls this in every process before its arguments are known, and only logs what is raised here. So hooks look
    at the resolved arguments themselves, and what is wrong is told by them (`guards.py`). The process ends here only if
    a variable of ours is wrong, or EAGLE_KERNELS_SGLANG asks for parts while one of those guards cannot be hooked."""
    try:
        asked = asked_by_variable()
        is_matching()
        preset()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    version = _version()
    if not is_supported(version) and os.environ.get(FORCE) != "1":
        logger.warning(
            "eagle_kernels: SGLang %s is outside of %s..%s, which the plug-in was checked with: nothing is replaced; "
            "%s=1 tries anyway, and `python -m eagle_kernels env` says what differs",
            version, hooks.TESTED[0], hooks.TESTED[-1], FORCE,
        )  # fmt: skip
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    from .guards import create_backend

    faults = [fault for hook in hooks.GUARDS if (fault := hook.fault()) is not None]
    if faults and asked:  # what would tell it later is missing
        raise SystemExit(f"eagle_kernels: this SGLang is not as the plug-in expects: {'; '.join(faults)}")
    register_attention_backend(NAME)(create_backend)
    add_attention_backend_choices([NAME])
    for hook in (*hooks.GUARDS, *hooks.HOOKS):
        if hook.fault() is None:
            HookRegistry.register(hook.target, _marked(hook), HookType.AROUND)


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        import sglang

        return sglang.__version__


def _marked(hook: hooks.Hook):
    """Returns what SGLang calls around its function: ours, or the original alone while the part is off.
    Ours is imported at its first call. The mark tells `guards` that it is in place. What torch.compile traces keeps
    SGLang's function, which it knows how to fuse."""
    ours = None

    def call(original, *args, **kwargs):
        nonlocal ours
        if hook.part and (not is_on(hook.part) or torch.compiler.is_compiling()):
            return original(*args, **kwargs)
        if ours is None:
            ours = hook.function()
            note_use(hook.part)
        return ours(original, *args, **kwargs)

    call.eagle_kernels_hook = hook.target
    return call


def is_supported(version: str) -> bool:
    """Tells whether a version of SGLang lies in the range that the plug-in was checked with."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))

    return numbers(hooks.TESTED[0]) <= numbers(version) <= numbers(hooks.TESTED[-1])
