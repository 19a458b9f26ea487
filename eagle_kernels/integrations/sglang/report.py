"""What `python -m eagle_kernels env` says about SGLang; setup.py makes it an entry point."""

import os

from ..shared.report import rows
from ..shared.sources import Sources
from . import hooks
from .contract import CONTRACT
from .parts import ALGORITHM, NAME


def lines() -> list[tuple[str, str]]:
    """Returns rows: the installed SGLang, each hook, and what else differs from what the plug-in relies on."""
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    left_out = f"SGLANG_PLUGINS leaves {NAME} out" if allowed and NAME not in allowed else None
    return rows("sglang", hooks, CONTRACT, left_out, _algorithm)


def _algorithm(sources: Sources) -> list[tuple[str, str]]:
    is_own = sources.find(f"sglang.srt.speculative.spec_info.SpeculativeAlgorithm.{ALGORITHM}") is not None
    whose = "SGLang's own" if is_own else "the plug-in's: EAGLE with one draft in each step"
    return [(f"sglang algorithm {ALGORITHM}", whose)]
