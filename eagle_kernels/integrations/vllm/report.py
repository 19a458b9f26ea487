"""What `python -m eagle_kernels env` says about vLLM; setup.py makes it an entry point."""

import os

from ..shared.report import rows
from . import hooks
from .contract import CONTRACT, NAME


def lines() -> list[tuple[str, str]]:
    """Returns rows: the installed vLLM, each hook, and what else differs from what the plug-in relies on."""
    allowed = os.environ.get("VLLM_PLUGINS")  # vLLM strips no names, and an empty value allows none
    is_out = allowed is not None and NAME not in allowed.split(",")
    return rows("vllm", hooks, CONTRACT, f"VLLM_PLUGINS leaves {NAME} out" if is_out else None)
