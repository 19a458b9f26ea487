"""The devices of this machine that torch can use, and the choice of a model's device and dtype among them."""

import os
import platform
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .values import is_word, shown

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float": torch.float32,
    "half": torch.float16,
}  # fmt: skip


def read_placement(
    caller: str, device: str | torch.device | None, dtype: torch.dtype | str | None, *others: str
) -> tuple[torch.device, torch.dtype]:
    """Returns the device and the dtype of the weights. None stands for `choose_device()`, as "auto", and float32."""
    is_free = device is None or is_word(device, "auto")
    device = choose_device() if is_free else read_device(f"{caller}: device", device, *others)
    known = torch.float32 if dtype is None else dtype
    if isinstance(known, str):
        known = DTYPE_NAMES.get(known.removeprefix("torch."))
    if not (isinstance(known, torch.dtype) and known in DTYPES):
        raise ValueError(
            f"{caller}: dtype must be {', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}, got {shown(dtype)}"
        )
    return device, known


def choose_device(tell: Callable[[str], None] | None = None) -> torch.device:
    """Returns the GPU, else the CPU; if torch cannot use an existing GPU, `tell` gets the reason (None: a warning)."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    reason = why_no_gpu()
    if reason is not None and tell is not None:
        tell(f"runs on the CPU: {reason}")
    elif reason is not None:
        warnings.warn(f"eagle_kernels: runs on the CPU: {reason}", stacklevel=2)
    return torch.device("cpu")


def read_device(owner: str, name: str | torch.device, *others: str) -> torch.device:
    """Returns the device if this machine has it; `others` are further names that the caller allows."""
    try:
        device = torch.device(name)
    except Exception:  # torch raises what the kind of value makes it raise
        device = None
    if device is None or device.type not in ("cpu", "cuda", *others):
        raise ValueError(f"{owner} must be {', '.join((*others, 'cpu'))}, cuda or cuda:N, got {shown(name)}")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        reason = why_no_gpu() or f"this machine has {torch.cuda.device_count()} GPUs that torch can use"
        raise ValueError(f"{owner} {name}: {reason}")
    if device.type == "cpu" and device.index:
        raise ValueError(f"{owner} must be cpu without a number, since there is only one, got {shown(name)}")
    if device.type == "cpu":
        return torch.device("cpu")
    return device


def device_name(device: torch.device) -> str:
    """Names the device for the record of a run."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def why_no_gpu() -> str | None:
    """Returns why torch cannot use the machine's GPU; None if it can, if there is none, or if the user hides it."""
    files = gpu_files()
    hidden = [os.environ.get(f"{name}_VISIBLE_DEVICES") in ("", "-1") for name in ("CUDA", "HIP", "ROCR")]
    if torch.cuda.is_available() or not files or any(hidden):
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build without CUDA or ROCm, and this machine has a GPU ({files[0]}); "
            "https://pytorch.org/get-started says how to install one with them"
        )
    return (
        f"torch {torch.__version__} finds no GPU to use, although this machine has one ({files[0]}); is torch built "
        "for another vendor, is the driver too old, or does this user lack access to it?"
    )


def gpu_files() -> list[str]:
    """Lists the device files of NVIDIA and AMD GPUs, whatever torch was built for."""
    return sorted(map(str, [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]))


def free_memory_bytes(device: torch.device) -> int | None:
    """Returns the memory that can be allocated on the device now, or None where it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    table = Path("/proc/meminfo")
    if device.type == "cpu" and table.is_file():
        available = re.search(r"^MemAvailable: *(\d+) kB", table.read_text(encoding="ascii"), re.MULTILINE)
        return int(available[1]) * 1024 if available else None
    return None


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Returns whether two devices are one; `cuda` without an index is any `cuda:N`."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def rounds_fp32_matmuls() -> bool:
    """Returns whether PyTorch was allowed to round the inputs of fp32 products, on the GPU."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # its newer sibling, torch.backends.cuda.matmul.fp32_precision, was set to something lower
        return True
