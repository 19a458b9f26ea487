"""One call that checks an op against its reference under the rules that every op keeps."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Sequence

import torch

from eagle_kernels.runtime import check

from .cases import as_tuple
from .compare import assert_close, assert_equal
from .poison import Guarded
from .typed import is_of


def check_operation(
    path: str, values: dict, *, case: str = "", close: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple:
    """Runs the launcher of `path` (`"tree.build_tree"`) and its reference on the same arguments and compares them.

    Outputs are poisoned and lie between guard zones; inputs must come out unchanged. Outputs named in `close` are
    compared as floats, those in `skip` not at all, all others exactly. Returns (launcher's outputs, reference's).
    """
    name = path.rpartition(".")[2]
    module = importlib.import_module("eagle_kernels.ops." + path)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    defaults = _defaults(getattr(module, name))
    contracted = module.contract({**defaults, **values, "out": None})
    single = isinstance(contracted, check.Spec)
    specs = (contracted,) if single else contracted
    fields = ("output",) if single else contracted._fields
    guarded = [Guarded(spec.shape, spec.dtype, spec.device) for spec in specs]
    out = guarded[0].tensor if single else type(contracted)(*(g.tensor for g in guarded))
    inputs = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}

    known = inspect.signature(reference).parameters
    expected = reference(**{key: value for key, value in values.items() if key in known})
    actual = getattr(module, name)(**values, out=out)
    for function, result in ((reference, expected), (getattr(module, name), actual)):
        kind = typing.get_type_hints(function)["return"]
        assert is_of(result, kind), f"{function.__module__} returns {type(result)}, not {kind}"
    for field, guard in zip(fields, guarded):
        guard.check(name, field)
    for key, before in inputs.items():
        assert_equal(name, case, f"(input) {key}", values[key], before)
    for field, got, want in zip(fields, as_tuple(actual), as_tuple(expected)):
        if field in skip:
            continue
        if field in close:
            assert_close(name, case, field, got, want)
        else:
            assert_equal(name, case, field, got, want)
    return actual, expected


def _defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
