"""Where the arguments of recorded launches came from: what a plan needs to make them again (`launch.py`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .triton_3_6 import launch_of


class Launch(NamedTuple):
    run: Callable  # launches the compiled kernel, or lets Triton do so
    arguments_of: Callable  # makes the arguments of `run` from the stream, the constants, and addresses or tensors
    constants: list


class Recorded(NamedTuple):
    """A launch: what Triton compiled for its arguments, by name."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


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

    def launch(self, recorded: Recorded) -> Launch:
        """Returns how we make a launch, by addresses."""
        kernel, compiled, grid, arguments = recorded
        run, head = launch_of(compiled, grid, _STREAM)
        constants = []
        places = self._place((*head, *map(arguments.get, kernel.arg_names)), constants)
        return Launch(run, _evaluated(places), constants)

    def launch_by_triton(self, recorded: Recorded) -> Launch:
        """Returns how Triton makes a launch, by tensors: it looks at their types, and at those of bundles."""
        names, run, constants = [*recorded.arguments], recorded.kernel[recorded.grid], []
        places = self._place(tuple(recorded.arguments.values()), constants, has_types=True)
        return Launch(lambda *values: run(**dict(zip(names, values))), _evaluated(places), constants)

    def _place(self, value: Any, constants: list, has_types: bool = False) -> str:
        """Returns where a value comes from, as a Python expression; constants: gets what no tensor is."""
        if value is _STREAM:
            return "s"
        if isinstance(value, torch.Tensor):
            index = self.index(value)
            if has_types and self._tensors[index].dtype != value.dtype:
                raise LookupError("a view with another dtype")
            return f"v[{index}]"
        if isinstance(value, tuple):
            inner = "".join(self._place(each, constants, has_types) + ", " for each in value)
            kind = self._place(value._make, constants) if has_types and hasattr(value, "_make") else ""
            return f"{kind}(({inner}))"
        if hasattr(value, "block_shape"):
            raise LookupError("a tensor descriptor, which holds the address of this call's tensor")
        constants.append(value)
        return f"c[{len(constants) - 1}]"


def _evaluated(places: str) -> Callable:
    """Returns a function that makes arguments of the stream, the constants, and addresses or tensors.
    It is written out in full, since it runs at every call: a loop over bundles would take twice as long."""
    return eval(f"lambda s, c, v: {places}")
