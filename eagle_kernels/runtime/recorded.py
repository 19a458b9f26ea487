"""Where the arguments of recorded launches came from: what a plan needs to make them again (`launch.py`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .triton_3_6 import launch_of


class Launch(NamedTuple):
    run: Callable  # launches the compiled kernel
    arguments_of: Callable  # picks the arguments of `run`, bundles as tuples, out of [stream, *constants, *addresses]
    constants: tuple


_STREAM = object()  # stands for the stream of the call


class Tensors:
    """The tensors that a plan can name: those of the call, views of their whole, and what the launcher allocated."""

    def __init__(self, tensors: list, pointers: list):
        self._tensors, self._pointers = list(tensors), pointers
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.allocated: list = []

    def index(self, tensor: torch.Tensor) -> int:
        """Returns its place. Raises LookupError for a tensor whose address does not follow from the call's tensors."""
        for index, known in enumerate(self._tensors):
            if tensor is known:
                return index
        if tensor.untyped_storage().data_ptr() in self._storages:
            if self._pointers.count(tensor.data_ptr()) != 1:
                raise LookupError("a view into the middle of an argument, or of two arguments at once")
            return self._pointers.index(tensor.data_ptr())
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        if not is_whole:
            raise LookupError("a view of an allocated tensor")
        self._tensors.append(tensor)
        self.allocated.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
        return len(self._tensors) - 1

    def launch(self, compiled, grid: tuple[int, ...], arguments: list) -> Launch:
        run, head = launch_of(compiled, grid, _STREAM)
        values, constants = [*head, *arguments], []
        flat = [value for value in values for value in (value if isinstance(value, tuple) else (value,))]
        if any(hasattr(value, "block_shape") for value in flat):
            raise LookupError("a tensor descriptor, which holds the address of this call's tensor")
        num_constants = sum(not (value is _STREAM or isinstance(value, torch.Tensor)) for value in flat)

        def place(value) -> int:
            if value is _STREAM:
                return 0
            if isinstance(value, torch.Tensor):
                return 1 + num_constants + self.index(value)
            constants.append(value)
            return len(constants)

        places = [tuple(map(place, value)) if isinstance(value, tuple) else place(value) for value in values]
        return Launch(run, _picker(places), tuple(constants))


def _picker(places: list[int | tuple[int, ...]]) -> Callable:
    """Returns a function that picks these places out of a list, and those of each tuple among them as a tuple.
    It is written out in full, since it runs at every call: a loop over bundles would take twice as long."""

    def source(place) -> str:
        return f"({''.join(source(each) + ', ' for each in place)})" if isinstance(place, tuple) else f"v[{place}]"

    return eval(f"lambda v: {source(tuple(places))}")
