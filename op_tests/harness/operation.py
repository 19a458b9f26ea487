"""One call that checks an op against its reference under the rules that every op keeps."""

import importlib
import inspect
import typing
from collections.abc import Sequence

import torch

from eagle_kernels.runtime import check

from .cases import as_tuple, contracted, in_float64
from .compare import assert_close, assert_equal
from .poison import Guarded
from .typed import is_of


def check_operation(
    path: str, values: dict, *, case: str = "", close: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple:
    """Runs the launcher of `path` (`"tree.build_tree"`) and its reference on the same arguments and compares them.

    Outputs are poisoned; they and what the op changes in place (MUTATES) lie between guard zones. The latter must be,
    bit by bit, what the reference makes of them, and other inputs must come out unchanged. Outputs named in `close` are
    compared as floats, those in `skip` not at all, all others exactly. Returns (launcher's outputs, reference's).
    """
    name = path.rpartition(".")[2]
    module = importlib.import_module("eagle_kernels.ops." + path)
    launcher = getattr(module, name)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    contract = contracted(path, values | {"out": None})
    single = isinstance(contract, check.Spec)
    specs = {"output": contract} if single else {} if contract is None else contract._asdict()
    guarded = {field: Guarded(spec.shape, spec.dtype, spec.device) for field, spec in specs.items()}
    buffers = [guard.tensor for guard in guarded.values()]
    out = {"out": buffers[0] if single else type(contract)(*buffers)} if specs else {}
    inputs = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
    changed = {key: inputs[key].clone() for key in getattr(module, "MUTATES", ())}

    known = inspect.signature(reference).parameters
    expected = reference(**{key: value for key, value in (values | changed).items() if key in known})
    pools = {key: Guarded(values[key].shape, values[key].dtype, values[key].device) for key in changed}
    pools = {key: guard for key, guard in pools.items() if values[key].is_contiguous()}
    for key, guard in pools.items():
        guard.tensor.copy_(values[key])
    actual = launcher(**values | {key: guard.tensor for key, guard in pools.items()}, **out)
    for function, result in ((reference, expected), (launcher, actual)):
        kind = typing.get_type_hints(function)["return"]
        assert is_of(result, kind), f"{function.__module__} returns {type(result)}, not {kind}"
    for field, guard in (guarded | pools).items():
        guard.check(name, field)
    for key, guard in pools.items():
        values[key].copy_(guard.tensor)
    for key, before in inputs.items():
        if key in changed:
            assert_equal(name, case, key, as_bits(values[key]), as_bits(changed[key]))
        else:
            assert_equal(name, case, f"(input) {key}", values[key], before)
    for field, got, want in zip(specs, as_tuple(actual), as_tuple(expected)):
        if field in skip:
            continue
        if field in close:
            assert_close(name, case, field, got, want)
        else:
            assert_equal(name, case, field, got, want)
    return actual, expected


def check_close(path: str, values: dict, case: str = "", *, fields: Sequence[str] = ("output",),
                exact: Sequence[str] = (), rows=...):  # fmt: skip
    """Runs an op as above; its outputs, `fields`, are within twice the reference's own error, which float64 shows.

    exact: those that have the reference's bits as well. rows: those that are written. Returns the launcher's outputs.
    """
    name = path.rpartition(".")[2]
    actual, baseline = check_operation(path, values, case=case, skip=[field for field in fields if field not in exact])
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    known = inspect.signature(reference).parameters
    expected = reference(**{key: value for key, value in in_float64(values).items() if key in known})
    for field, *results in zip(fields, as_tuple(actual), as_tuple(expected), as_tuple(baseline), strict=True):
        if results[0].numel():
            assert_close(name, case, field, *(result[rows] for result in results))
    return actual


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, which are equal for NaN too."""
    return tensor.contiguous().view(torch.uint8)
