"""`python -m eagle_kernels env`: versions, devices, backend, cache folder."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch

from ...runtime import language
from ...runtime.library import backend
from ...runtime.placement import why_no_gpu
from ...runtime.target import architecture
from .shared import as_lines


def add_environment_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `env`."""
    command.set_defaults(run=_environment)


def _environment(arguments: argparse.Namespace) -> int:
    rows = [("eagle_kernels", str(Path(__file__).parents[2])), ("python", platform.python_version())]
    rows.append(("torch", torch.__version__))
    if language.MISSING is None:
        rows.append(("triton", language.triton.__version__))
        rows.append(("triton cache", language.triton.knobs.cache.dir))
    else:
        rows.append(("triton", f"kernels need {language.MISSING}; CPU tensors run the references"))
    rows.append(("backend on cpu", backend(torch.device("cpu"))))
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        facts = (torch.cuda.get_device_name(index), architecture(device), backend(device))
        rows.append((f"cuda:{index}", ", ".join(facts)))
    if not torch.cuda.device_count():
        reason = why_no_gpu()
        rows.append(("gpu", "none that torch can use" + (f": {reason}" if reason else "")))
    print(as_lines(rows))
    return 0
