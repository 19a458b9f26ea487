"""Buffers that show unwritten elements and writes out of bounds: poison inside, guard zones on both sides."""

import functools
import sys

import torch
from torch.utils._device import _device_constructors

_GUARD_ELEMENTS = 256
_INTEGER_POISON = 0x5A


class Guarded:
    """A poisoned contiguous `.tensor` between two guard zones; `.check(op, name)` tells if a zone was touched."""

    def __init__(self, shape, dtype: torch.dtype, device):
        size = 1
        for axis in shape:
            size *= axis
        element = torch.empty(0, dtype=dtype).element_size()
        self._bytes = torch.full(
            ((size + 2 * _GUARD_ELEMENTS) * element,), _INTEGER_POISON, dtype=torch.uint8, device=device
        )
        flat = self._bytes.view(dtype)
        if dtype.is_floating_point:
            flat.fill_(float("nan"))
        elif dtype == torch.bool:
            self._bytes.random_(0, 2)
        self._before = self._bytes.clone()
        self.tensor = flat[_GUARD_ELEMENTS : _GUARD_ELEMENTS + size].view(shape)
        self._guard_bytes = _GUARD_ELEMENTS * element

    @property
    def before(self) -> torch.Tensor:
        """What `.tensor` held at first."""
        inner = self._before[self._guard_bytes : len(self._before) - self._guard_bytes]
        return inner.view(self.tensor.dtype).view(self.tensor.shape)

    def check(self, op: str, name: str) -> None:
        for side, zone in (("before", slice(None, self._guard_bytes)), ("after", slice(-self._guard_bytes, None))):
            if not torch.equal(self._bytes[zone], self._before[zone]):
                touched = int((self._bytes[zone] != self._before[zone]).sum())
                raise AssertionError(f"{op}: {touched} bytes of the guard zone {side} {name} were overwritten")


@functools.cache
def poison_memory() -> None:
    """From now on whatever ops allocate, outputs and scratch, holds extremes of both signs, as a GPU's memory may."""
    empty = torch.empty
    _device_constructors()  # keeps what torch.empty is now: `with torch.device("meta")` knows those functions alone

    @functools.wraps(empty)
    def poisoned(*sizes, **options):
        tensor = empty(*sizes, **options)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("eagle_kernels.") and tensor.device.type == "cpu":
            if torch._C._len_torch_dispatch_stack() == 0:  # else nothing is to be computed
                for place, number in enumerate(_extremes(tensor.dtype)):
                    tensor.view(-1)[place::3] = number
        return tensor

    torch.empty = poisoned


@functools.cache
def _extremes(dtype: torch.dtype) -> tuple:
    """Three numbers of this kind, the last of which may be taken for a sound one."""
    if dtype.is_floating_point:
        return float("inf"), float("nan"), float("-inf")
    if dtype == torch.bool:
        return True, False, True
    limits = torch.iinfo(dtype)
    return limits.max, limits.min, 0x7F000000 << 32 if dtype == torch.int64 else 1
