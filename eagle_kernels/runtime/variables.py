"""The environment variables that begin with our name. One that is misspelt would change nothing, without a word."""

import difflib
import os
import warnings

PREFIX = "EAGLE_KERNELS_"
_NAMES = "BACKEND DEBUG PDL STORIES SGLANG SGLANG_FORCE SGLANG_PRESET SGLANG_SITE SGLANG_VERIFY SGLANG_WHEELS"
_NAMES += " VLLM VLLM_FORCE VLLM_PROMPTS VLLM_SITE VLLM_WHEELS"
KNOWN = frozenset(PREFIX + name for name in _NAMES.split())


def warn_of_unknown() -> None:
    """Warns of variables with our name, or nearly so, that nothing reads."""
    for name in sorted(os.environ):
        if name.upper().startswith("EAGLE_KERNEL") and name not in KNOWN:
            close = difflib.get_close_matches(name.upper(), KNOWN, 1, 0.9)
            meant = f"did you mean {close[0]}?" if close else "TROUBLESHOOTING.md lists all"
            warnings.warn(f"the environment variable {name} is set, but nothing reads it; {meant}", stacklevel=2)
