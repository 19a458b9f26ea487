"""`python -m eagle_kernels env`: versions, devices, backend, cache folder, and what plug-ins report."""

import argparse
import platform
from importlib.metadata import entry_points
from pathlib import Path

import torch

from ...runtime import language
from ...runtime.library import backend
from ...runtime.placement import why_no_gpu
from ...runtime.target import architecture
from ...runtime.values import first_line
from .shared import as_lines

REPORTS = "eagle_kernels.reports"  # the group of entry points that return rows for `env`, such as plug-ins


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
    print(as_lines(rows + _reports()))
    return 0


def _reports() -> list[tuple[str, str]]:
    """Returns the rows of all entry points of this group; there are none where the package is not installed."""
    rows = []
    for entry in sorted(entry_points(group=REPORTS), key=lambda entry: entry.name):
        try:
            rows += entry.load()()
        except Exception as error:
            rows.append((entry.name, f"no report: {type(error).__name__}: {first_line(error)}"))
    return rows
