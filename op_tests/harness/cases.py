"""The arguments that each op's test module declares, and what an op takes."""

from __future__ import annotations

import importlib
import inspect

import torch

from .ahead_of_time import module_of_tests


def module_of_op(path: str):
    return importlib.import_module("eagle_kernels.ops." + path)


def signature_of(path: str) -> dict[str, inspect.Parameter]:
    name = path.rpartition(".")[2]
    return inspect.signature(getattr(module_of_op(path), name)).parameters


def cases_of(path: str):
    for _, values in module_of_tests(path).ahead_of_time_cases():
        yield {name: value for name, value in values.items() if name != "out"}


def tensors_of(values: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def copied(values: dict) -> dict:
    return values | {name: tensor.clone() for name, tensor in tensors_of(values).items()}
