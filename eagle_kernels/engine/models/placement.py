"""Where the weights of a model go, and as what: chosen or checked by name before a file is opened."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_placement(
    caller: str, device: str | torch.device | None, dtype: torch.dtype | None, *others: str
) -> tuple[torch.device, torch.dtype]:
    """The device, see `read_device`, and the dtype of weights; None: what the command takes, see `choose_device`, and
    float32."""
    device = choose_device() if device is None else read_device(f"{caller}: device", device, *others)
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"{caller}: dtype must be {', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}, got {dtype!r}")
    return device, dtype


def choose_device(tell: Callable[[str], None] | None = None) -> torch.device:
    """The GPU, or the CPU where torch can use none; `tell` gets a line (None: it is a warning) if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    reason = why_no_gpu()
    if reason is not None and tell is not None:
        tell(f"takes the CPU: {reason}")
    elif reason is not None:
        warnings.warn(f"eagle_kernels: takes the CPU: {reason}", stacklevel=2)
    return torch.device("cpu")


def read_device(owner: str, name: str | torch.device, *others: str) -> torch.device:
    """A device that this machine has; `others` are names that the caller takes beside those of CPU and GPUs."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda", *others):
        raise ValueError(f"{owner} must be {', '.join((*others, 'cpu'))}, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        reason = why_no_gpu() or f"this machine has {torch.cuda.device_count()} GPUs that torch can use"
        raise ValueError(f"{owner} {name}: {reason}")
    return device


def why_no_gpu() -> str | None:
    """Why torch uses no GPU of a machine that has one; None: there is none, torch uses it, or it is hidden."""
    files = gpu_files()
    hidden = [os.environ.get(f"{name}_VISIBLE_DEVICES") in ("", "-1") for name in ("CUDA", "HIP", "ROCR")]
    if torch.cuda.is_available() or not files or any(hidden):
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build without CUDA or ROCm, and this machine has a GPU ({files[0]}); "
            "https://pytorch.org/get-started tells how to install another"
        )
    return (
        f"torch {torch.__version__} finds no GPU to use, and this machine has one ({files[0]}); is its driver too old, "
        "or closed to this user?"
    )


def gpu_files() -> list[str]:
    """What the drivers of NVIDIA and AMD show of GPUs, whatever torch was built for."""
    return sorted(map(str, [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]))
