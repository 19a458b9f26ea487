"""Buffers that show unwritten elements and writes out of bounds: poison inside, guard zones on both sides."""

from __future__ import annotations

import torch

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
