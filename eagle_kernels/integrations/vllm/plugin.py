"""Registers the plug-in with vLLM: the entry point of the group `vllm.general_plugins`."""

import functools
import importlib
import os
from collections.abc import Iterable
from enum import Enum

from ..shared.hooks import Hook, marked, resolve
from ..shared.versions import is_taken
from . import hooks
from .parts import SWITCHES, asked_by_variable, backend_name, logger, reads_prompts

FORCE = "EAGLE_KERNELS_VLLM_FORCE"


def register() -> None:
    """Registers the attention backend and the guards, which do nothing until a configuration asks for parts.

    vLLM calls this in every process, several times, before the configuration is known, and only logs what is raised
    here. So the guards look at the configuration themselves (`guards.py`). The process ends here only if
    a variable of ours is wrong, or EAGLE_KERNELS_VLLM asks for parts while a guard cannot be hooked.
    """
    try:
        asked = asked_by_variable()
        reads_prompts()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not is_taken("vllm", "vLLM", hooks.TESTED, FORCE, os.environ.get(FORCE) == "1", logger):
        return
    faults = rebind(hooks.GUARDS)
    if faults:  # what would check the configuration and the workers is missing
        told = f"eagle_kernels: this vLLM is not as the plug-in expects: {'; '.join(faults)}"
        if asked:
            raise SystemExit(told)
        logger.warning("%s; nothing is replaced, and --attention-backend %s is not registered", told, backend_name())
        return
    registered_backend()


def registered_backend() -> Enum:
    """Returns vLLM's member for our attention backend, which is registered unless another plug-in has it.

    A spawned process unpickles its configuration before vLLM loads plug-ins there, and knows no new names by then. So
    what is pickled of a new name is a call of this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name = backend_name()
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, hooks.BACKEND_CLASS)
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (registered_backend, ())
    elif not AttentionBackendEnum[name].is_overridden():  # else the guards say whose it is
        register_backend(AttentionBackendEnum[name], hooks.BACKEND_CLASS)
    return AttentionBackendEnum[name]


def rebind(wanted: Iterable[Hook]) -> list[str]:
    """Puts what is called around vLLM's functions in their place, once; returns what is wrong with those it leaves."""
    faults = []
    for hook in wanted:
        fault = hook.fault()
        if fault is not None:
            faults.append(fault)
            continue
        path, name = hook.target.rsplit(".", 1)
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError:  # a class
            owner = resolve(path)
        original = getattr(owner, name)
        if getattr(original, "eagle_kernels_hook", None) != hook.target:
            setattr(owner, name, _around(original, hook))
    return faults


def _around(original, hook: Hook):
    around = marked(hook, SWITCHES)

    @functools.wraps(original)
    def call(*args, **kwargs):
        return around(original, *args, **kwargs)

    call.eagle_kernels_hook = hook.target
    return call
