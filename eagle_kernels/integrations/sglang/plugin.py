"""Registers the plug-in with SGLang: the entry point of the group `sglang.srt.plugins`."""

import logging
import os

from ..shared.hooks import marked
from ..shared.versions import is_taken
from . import hooks
from .parts import NAME, SWITCHES, asked_by_variable, is_matching, preset

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
    if not is_taken("sglang", "SGLang", hooks.TESTED, FORCE, os.environ.get(FORCE) == "1", logger):
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
            HookRegistry.register(hook.target, marked(hook, SWITCHES), HookType.AROUND)
