"""Where the weights of a model go, and as what: checked by name before a file is opened."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_placement(caller: str, device: str | torch.device, dtype: torch.dtype, *others: str) -> torch.device:
    """The device, see `read_device`, of weights of this dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"{caller}: dtype must be {', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}, got {dtype!r}")
    return read_device(f"{caller}: device", device, *others)


def read_device(owner: str, name: str | torch.device, *others: str) -> torch.device:
    """A device that this machine has; `others` are names that the caller takes beside those of CPU and GPUs."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda", *others):
        raise ValueError(f"{owner} must be {', '.join((*others, 'cpu'))}, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ValueError(f"{owner} {name}: this machine has {torch.cuda.device_count()} GPUs that torch can use")
    return device
