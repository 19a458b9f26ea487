"""What `python -m eagle_kernels env` says about SGLang; setup.py makes it an entry point."""

import importlib.metadata
import os

from ..shared.contract import differences, of_hook, short
from ..shared.sources import Sources
from ..shared.versions import is_supported
from . import hooks
from .contract import CONTRACT
from .parts import ALGORITHM, NAME


def lines() -> list[tuple[str, str]]:
    """Returns rows: the installed SGLang, each hook, and what else differs from what the plug-in relies on.
    SGLang is read, not imported, so this works on a machine on which it would not start."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [("sglang", "not installed")]
    place = "within" if is_supported(version, hooks.TESTED) else "outside of"
    rows = [("sglang", f"{version}, {place} {hooks.TESTED[0]}..{hooks.TESTED[-1]}, which the plug-in was checked with")]
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and NAME not in allowed:
        rows.append(("sglang plug-in", f"SGLANG_PLUGINS leaves {NAME} out"))
    sources = Sources.installed("sglang")
    if sources is None:
        return [*rows, ("sglang hooks", "Python finds no package sglang")]
    for hook in (*hooks.GUARDS, *hooks.HOOKS):
        faults = differences(sources, (of_hook(hook),))
        text = "; ".join(faults) or f"found ({hook.part or 'guard'})"
        rows.append((f"sglang hook {short(hook.target)}", text))
    is_own = sources.find(f"sglang.srt.speculative.spec_info.SpeculativeAlgorithm.{ALGORITHM}") is not None
    whose = "SGLang's own" if is_own else "the plug-in's: EAGLE with one draft in each step"
    rows.append((f"sglang algorithm {ALGORITHM}", whose))
    return rows + [("sglang differs", fault) for fault in differences(sources, CONTRACT)]
