"""What the machine is: the only place that asks about architectures. Nothing is probed at import."""

import contextlib
import functools
import os

import torch

from . import language
from .values import shown

# Shared memory (LDS) that one program may use, in bytes; the compiler itself does not refuse more on every target.
SHARED_MEMORY_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536, "gfx950": 163_840}

# 8-bit floats of four exponent bits that an architecture's own instructions read and write.
FP8_ON = {torch.float8_e4m3fn: "sm_89 and up, gfx950", torch.float8_e4m3fnuz: "gfx942"}

# A switch for whoever suspects it: results are the same without, launches take longer.
_PDL = os.environ.get("EAGLE_KERNELS_PDL", "")
if _PDL not in ("", "0", "1"):
    raise ValueError(f"EAGLE_KERNELS_PDL must be 0 or 1, got {shown(_PDL)}")

_assumed: str | None = None


def architecture(device: torch.device) -> str:
    """Returns `sm_90`, `gfx942`, ... of a GPU, `cpu` for everything else."""
    if _assumed is not None:
        return _assumed
    if device.type != "cuda":
        return "cpu"
    return _gpu_architecture(device.index if device.index is not None else torch.cuda.current_device())


def has_dependent_launch(device: torch.device) -> bool:
    """Returns whether kernels start while the one before ends, see primitives/dependent_launch.py."""
    name = architecture(device)
    is_able = name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90
    return is_able and _PDL != "0" and language.HAS_DEPENDENT_LAUNCH


class NotSupported(ValueError):
    """A request that this architecture cannot serve."""


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the architecture has this type, see FP8_ON; without a GPU both types are there."""
    name = architecture(device)
    if name.startswith("sm_"):
        return dtype == torch.float8_e4m3fn and int(name.removeprefix("sm_")) >= 89
    return dtype == {"cpu": dtype, "gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(name)


def num_multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors (AMD: compute units) a GPU has; without one, those of an H100."""
    if _assumed is not None or device.type != "cuda":
        return 132
    return _gpu_multiprocessors(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _gpu_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _gpu_architecture(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@contextlib.contextmanager
def assume(name: str):
    """Answers `name` for every device; ahead-of-time compilation chooses tuning rows of machines that are not here."""
    global _assumed
    before, _assumed = _assumed, name
    try:
        yield
    finally:
        _assumed = before
