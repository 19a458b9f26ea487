"""The arguments that each op's test module declares, and what an op takes."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .ahead_of_time import module_of_tests


def module_of_op(path: str):
    return importlib.import_module("eagle_kernels.ops." + path)


def signature_of(path: str) -> dict[str, inspect.Parameter]:
    name = path.rpartition(".")[2]
    return inspect.signature(getattr(module_of_op(path), name)).parameters


def sweep(make: Callable[..., dict], *others: Iterable) -> Callable[[], Iterator[dict]]:
    """Returns the `size_sweep` of a test module: what `make` returns for batches of every kind of size, and others."""
    return lambda: (make(*sizes) for sizes in itertools.product((1, 2, 3, 16, 17, 64, 257), *others))


def contracted(path: str, values: dict) -> Any:
    """What an op's contract says of its outputs."""
    defaults = {name: parameter.default for name, parameter in signature_of(path).items()}
    return module_of_op(path).contract({**defaults, **values})


def refusal(call: Callable, *arguments, **named) -> str:
    """What a call says that refuses its arguments, nothing where it takes them."""
    try:
        call(*arguments, **named)
    except ValueError as error:
        return str(error)
    return ""


def cases_of(path: str):
    for _, values in module_of_tests(path).ahead_of_time_cases():
        yield {name: value for name, value in values.items() if name != "out"}


def tensors_of(values: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def as_tuple(result) -> tuple:
    return () if result is None else (result,) if isinstance(result, torch.Tensor) else tuple(result)


def copied(values: dict) -> dict:
    return values | {name: tensor.clone() for name, tensor in tensors_of(values).items()}


def case_of_each_mode(path: str) -> list[dict]:
    """A small case, but not the smallest one, of each choice of flags, words, and arguments that are given."""
    modes = {}
    for values in cases_of(path):
        flags = tuple((name, value) for name, value in values.items() if isinstance(value, bool | str))
        given = tuple(name for name, value in values.items() if value is not None)
        modes.setdefault((flags, given), []).append(values)
    enough = [[values for values in alike if num_elements(values) > 1000] for alike in modes.values()]
    return [
        min(some, key=num_elements) if some else max(all_, key=num_elements)
        for some, all_ in zip(enough, modes.values())
    ]


def small_case(path: str) -> dict:
    """The op's first case, or its `order_case()` where that one is large, or only there to be compiled."""
    module = module_of_tests(path)
    return module.order_case() if hasattr(module, "order_case") else next(cases_of(path))


def num_elements(values: dict) -> int:
    """Of a view, those that it shows."""
    return sum(tensor.numel() for tensor in tensors_of(values).values())


def in_float64(values: dict) -> dict:
    """The same arguments with every float tensor in float64, for the reference as oracle, and keys and values times
    their scales, which then are none of its arguments."""
    wide = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in values.items()
    }
    for name in ("k", "v", "latent"):
        scale = wide.pop(f"{name}_scale", None)
        if scale is not None:  # of latents one for all
            wide[f"{name}_cache"] = wide[f"{name}_cache"] * scale[:, None]
    return wide
