"""Whether kernels stay within the tensors that they are given: Triton's interpreter sees every address."""

import contextlib
from collections.abc import Iterator

import torch

from eagle_kernels.runtime.language import is_interpreting


@contextlib.contextmanager
def assert_in_bounds():
    """A launch whose loads and stores leave its tensors raises an AssertionError that names the nearest one.

    On a GPU nothing is looked at: there it takes compute-sanitizer.
    """
    if not is_interpreting():
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    call = GridExecutor.__call__
    spans: list[tuple[str, int, int]] = []
    firsts = stops = np.empty(0, np.int64)
    outside: list[int] = []

    def look(pointers, mask):
        # of a tensor descriptor, triton 3.4 gives both as arrays
        places, mask = (each if isinstance(each, np.ndarray) else each.data for each in (pointers, mask))
        is_wanted = np.broadcast_to(mask.astype(bool), places.shape)
        addresses = places[is_wanted].astype(np.int64)
        is_inside = addresses < stops[np.searchsorted(firsts, addresses, side="right")]
        outside.extend(addresses[~is_inside].tolist())
        return is_inside.all()

    def looking_load(self, pointers, mask, other, *rest, **options):
        if not look(pointers, mask):
            mask = type(mask)(np.zeros_like(mask.data), mask.dtype)
        return load(self, pointers, mask, other, *rest, **options)

    def looking_store(self, pointers, value, mask, *rest):
        if look(pointers, mask):
            store(self, pointers, value, mask, *rest)

    def looking_call(self, *args, **arguments):
        nonlocal firsts, stops
        spans[:] = sorted((_span(*each) for each in _tensors(arguments)), key=lambda span: span[1])
        firsts = np.array([first for _, first, _ in spans], np.int64)
        # behind the place of an address among the firsts: where the last of the spans that begin before it ends
        stops = np.maximum.accumulate(np.array([0, *(stop for _, _, stop in spans)], np.int64))
        call(self, *args, **arguments)
        if outside:
            distances = [(min(abs(outside[0] - first), abs(outside[0] - stop)), name) for name, first, stop in spans]
            distance, name = min(distances)
            raise AssertionError(f"{len(outside)} addresses lie in no tensor, the first {distance} bytes from {name}")

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = looking_load, looking_store
    GridExecutor.__call__ = looking_call
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor.__call__ = call


def _tensors(arguments: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each argument, and of those in bundles."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from _tensors({f"{name}.{field}": member for field, member in value._asdict().items()})


def _span(name: str, tensor: torch.Tensor) -> tuple[str, int, int]:
    """(name, address of the first element, address behind the last one)."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return name, first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return name, first, first + (last + 1) * tensor.element_size()
