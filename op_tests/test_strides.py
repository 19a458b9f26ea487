"""Where the rows of a tensor begin does not matter: each leading axis of each argument and output gets an odd stride.

Kernels load wide where all rows are aligned, and promise the compiler that they are; `harness/hints.py` holds them to
it. All other tensors are aligned meanwhile, so that one that is not looked at shows.
"""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import check, launch

from .harness import to_device
from .harness.ahead_of_time import PATHS, module_of_tests
from .harness.cases import cases_of, copied, num_elements, signature_of, tensors_of
from .harness.drawn import contracted

MOST_ELEMENTS = 120_000
CACHES = ("k_cache", "v_cache")


def laid_out(tensor: torch.Tensor, free=(), odd: int | None = None, unit: int = 1) -> torch.Tensor:
    """The same numbers; strides of the free axes are multiples of 16, and that of one axis is a unit more."""
    strides, extent = [1], tensor.shape[-1]
    for axis in range(tensor.dim() - 2, -1, -1):
        least = -(-extent // 16) * 16 if axis in free else extent
        strides.insert(0, least + unit * (axis == odd))
        extent += strides[0] * (tensor.shape[axis] - 1)
    memory = tensor.new_empty(extent).view(torch.uint8).fill_(0x5A).view(tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def leading_axes(tensors: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    """What can show: (name, axis), where the axis has a second row."""
    axes = [(name, axis) for name, tensor in tensors.items() for axis in range(tensor.dim() - 1)]
    return [(name, axis) for name, axis in axes if tensors[name].shape[axis] > 1]


def some_cases(path: str) -> list[dict]:
    """Of the op's small cases with several rows the smallest one, and the smallest of those with most arguments."""
    module = module_of_tests(path)
    cases = [*cases_of(path), *itertools.islice(getattr(module, "size_sweep", tuple)(), 2)]
    cases += [module.order_case()] if hasattr(module, "order_case") else []
    cases = [values for values in cases if leading_axes(tensors_of(values)) and num_elements(values) < MOST_ELEMENTS]
    if not cases:
        return []
    return [min(cases, key=num_elements), min(cases, key=lambda each: (-len(tensors_of(each)), num_elements(each)))]


def call(path: str, tensors: dict[str, torch.Tensor], values: dict) -> dict[str, torch.Tensor]:
    """Runs the op on tensors of all its arguments and outputs, by name; returns them."""
    given = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] != "out"}
    out = {name.removeprefix("out."): tensor for name, tensor in tensors.items() if name not in given}
    if out:
        out = {"out": out["out"] if "out" in out else contracted(path, values | {"out": None})._replace(**out)}
    getattr(eagle_kernels.raw, path.rpartition(".")[2])(**values | given | out)
    return tensors


def all_tensors(path: str, values: dict) -> dict[str, torch.Tensor]:
    """Copies of the arguments, and outputs, by name."""
    specs = contracted(path, values | {"out": None}) or {}
    if specs:
        specs = {"out": specs} if isinstance(specs, check.Spec) else {f"out.{k}": v for k, v in specs._asdict().items()}
    empty = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for name, spec in specs.items() if spec
    }
    return tensors_of(copied(values)) | empty


def assert_close(found: dict, expected: dict, place) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor.float(), expected[name].float(), rtol=2e-3, atol=2e-3, equal_nan=True,
            msg=lambda text, at=(name, place): f"{at}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_strides_do_not_matter(path, device):
    for values in some_cases(path):
        values = to_device(values, device)
        tensors, free = all_tensors(path, values), {}
        with launch.intercept(lambda *_: None):
            for name, axis in leading_axes(tensors):
                try:
                    call(path, tensors | {name: laid_out(tensors[name], (axis,), axis)}, values)
                    free.setdefault(name, []).append(axis)
                except ValueError as error:
                    assert "stride" in str(error) or "contiguous" in str(error), error
        expected = call(path, all_tensors(path, values), values)
        for changed, odd in [(name, axis) for name, axes in free.items() for axis in axes]:
            laid = {
                name: laid_out(tensor, free.get(name, ()), odd if name == changed else None)
                for name, tensor in tensors.items()
            }
            assert_close(call(path, laid, values), expected, (changed, odd))


@pytest.mark.parametrize("path", [path for path in PATHS if "k_cache" in signature_of(path)])
def test_strides_of_pools_do_not_matter(path, device):
    """Each axis of both caches in turn, heads among them, steps over one row of a head more than the axes within it."""
    for values in [values for values in some_cases(path) if values.get("k_cache") is not None][-1:]:
        values = to_device(values, device)
        expected = call(path, all_tensors(path, values), values)
        for odd in range(values["k_cache"].dim() - 1):
            tensors = all_tensors(path, values)
            laid = {name: laid_out(tensors[name], odd=odd, unit=tensors[name].shape[-1]) for name in CACHES}
            assert_close(call(path, tensors | laid, values), expected, odd)
