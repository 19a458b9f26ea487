"""Registration with torch.library and the choice of backend.

`register(schema, find)` defines an op by its schema alone, so that exported programs find it by name; its file is
imported when it is first used. `Op(op_module, reference)` then turns the launcher in it and the reference into one
public function:

* `eagle_kernels::build_tree` is functional and allocates, `eagle_kernels::build_tree.out` writes into given buffers;
  both work under torch.compile (the op's contract infers shapes) and inside CUDA graphs;
* CPU tensors run the reference, GPU tensors the Triton launcher; EAGLE_KERNELS_BACKEND=reference|triton forces one;
* a call that the dispatcher would only pass on to the launcher goes straight there, in a tenth of the time;
* the ops have no derivatives: they refuse tensors that require them in grad mode, or that carry tangents; the
  function's attribute `reference` is plain PyTorch, which has them;
* a reference computes what its kernel does, whatever autocast, default device or matmul precision are around it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch.autograd import forward_ad

from . import check
from .calls import host_kinds, refuse_names, refuse_overlaps, refuse_shared, refuse_without_data
from .surroundings import undisturbed

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
ReferenceP = ParamSpec("ReferenceP")
ReferenceR = TypeVar("ReferenceR", covariant=True)

_LIBRARY = torch.library.Library("eagle_kernels", "DEF")

_SCHEMA_TYPES = {
    "torch.Tensor": "Tensor", "int": "SymInt", "float": "float", "bool": "bool", "str": "str",
    "torch.Tensor | None": "Tensor?", "int | None": "SymInt?", "float | None": "float?",
}  # fmt: skip


def backend(device: torch.device) -> str:
    """Returns `"reference"` or `"triton"` for tensors on `device`."""
    forced = os.environ.get("EAGLE_KERNELS_BACKEND", "")
    if forced not in ("", "reference", "triton"):
        raise ValueError(f"EAGLE_KERNELS_BACKEND must be 'reference' or 'triton', got {forced!r}")
    return forced or ("triton" if device.type == "cuda" else "reference")


class Overload(NamedTuple):
    """Holds what an overload of an op does."""

    run: Callable
    fake: Callable  # the same for tensors that have only shapes


def register(schema: str, find: Callable[[str], Op]) -> None:
    """Defines an overload, for every device but not for autograd; what it does is asked of `find(name)` per call."""
    overload_name = schema.partition("(")[0]
    name, _, suffix = overload_name.partition(".")
    suffix = suffix or "default"

    def run(*args, **kwargs):
        return find(name).overloads[suffix].run(*args, **kwargs)

    def fake(*args, **kwargs):
        return find(name).overloads[suffix].fake(*args, **kwargs)

    def refuse_derivatives(*args, **kwargs):
        overload = getattr(getattr(torch.ops.eagle_kernels, name), suffix)
        return _below_autograd(overload, find(name).names, args, kwargs)

    _LIBRARY.define(schema)
    _LIBRARY.impl(overload_name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(overload_name, refuse_derivatives, "Autograd")
    torch.library.register_fake(f"eagle_kernels::{overload_name}", fake, lib=_LIBRARY)


def schemas_of(module: ModuleType) -> list[str]:
    """Returns the schemas of the overloads of an op file."""
    name = module.__name__.rpartition(".")[2]
    parameters = inspect.signature(getattr(module, name)).parameters
    result_type, returns = getattr(module, "Output", None), "out" in parameters
    declared = ", ".join(_declare([p for p in parameters.values() if p.name != "out"], getattr(module, "MUTATES", ())))
    if not returns:
        return [f"{name}({declared}) -> ()"]
    fields = result_type._fields if result_type else ("output",)
    returned = ", ".join(["Tensor"] * len(fields))
    separator = ", " if "*" in declared else ", *, "
    buffers = ", ".join(f"Tensor({chr(ord('z') - i)}!) out_{field}" for i, field in enumerate(fields))
    return [
        f"{name}({declared}) -> ({returned})" if result_type else f"{name}({declared}) -> {returned}",
        f"{name}.out({declared}{separator}{buffers}) -> ()",
    ]


class Op:
    """An op, from its op file and its reference: its public `function`, its arguments' `names`, and its `overloads`.
    The op file offers the launcher (named as the file) and `contract(values)`. `MUTATES` names the arguments that an op
    works on in place; one that returns nothing besides has a contract that returns None, and no `out`. `IN_PLACE` names
    for a field of `Output`, or `out`, the arguments that such a buffer may be; nothing else may overlap a buffer."""

    def __init__(self, module: ModuleType, reference: Callable):
        self._op = name = module.__name__.rpartition(".")[2]
        self._module, self._reference = module, reference
        self._launcher = getattr(module, name)
        self._result_type = getattr(module, "Output", None)
        self._fields = self._result_type._fields if self._result_type else ("output",)
        self._signature = inspect.signature(self._launcher)
        self._returns = "out" in self._signature.parameters
        parameters = {key: each for key, each in self._signature.parameters.items() if key != "out"}
        self.names = list(parameters)
        self._defaults = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}
        self._check_kinds = host_kinds(name, parameters)
        self._reference_names = inspect.signature(reference).parameters
        self._packet = getattr(torch.ops.eagle_kernels, name)
        self.function = with_reference(self._public(), reference)
        self.overloads = {"default": Overload(self._functional(self._run), self._functional(self._infer))}
        if self._returns:
            self.overloads["out"] = Overload(self._into_buffers(self._run), self._into_buffers(self._infer))

    def _public(self) -> Callable:
        """Returns the public function. The quickest of three ways comes first: a plan, the launcher, the dispatcher."""
        went_again, went_straight, result_type = self._went_again, self._went_straight, self._result_type
        functional_overload, fields = self._packet.default, self._fields

        @functools.wraps(self._launcher)
        def returns_nothing(*args, **kwargs):
            if not went_again(args, kwargs) and not went_straight(args, kwargs):
                self._dispatch(functional_overload, args, kwargs)

        @functools.wraps(self._launcher)
        def returns_output(*args, **kwargs):
            done = went_again(args, kwargs)
            if done:
                return done[0]
            out = kwargs.pop("out", None)
            if out is None:
                result = went_straight(args, kwargs)
                if result:
                    return result[0]
                result = self._dispatch(functional_overload, args, kwargs)
                return result_type(*result) if result_type else result
            buffers = check.unpack(self._op, out, len(fields)) if result_type else (out,)
            if type(out) is (result_type or torch.Tensor) and went_straight(args, kwargs, out, buffers):
                return out
            buffer_arguments = {"out_" + field: buffer for field, buffer in zip(fields, buffers)}
            self._dispatch(self._packet.out, args, {**kwargs, **buffer_arguments}, out)
            return result_type(*buffers) if result_type else out

        return returns_output if self._returns else returns_nothing

    def _went_again(self, args, kwargs) -> tuple:
        """Makes a call that looks like one of the last few; returns (its result,), or () where it must not be made."""
        is_free = not _is_watched() and os.environ.get("EAGLE_KERNELS_BACKEND", "") in ("", "triton")
        return self._launcher.again(args, kwargs) if is_free else ()

    def _went_straight(self, args, kwargs, out=None, buffers=()) -> tuple:
        """Calls the launcher and returns (its result,), if nobody else waits for the call; otherwise ()."""
        if not _goes_straight(args, kwargs, buffers):
            return ()
        try:
            return (self._launcher(*args, **kwargs) if out is None else self._launcher(*args, **kwargs, out=out),)
        except TypeError:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError:  # `_dispatch` names what does not fit
                return ()
            raise

    def _dispatch(self, overload, args, kwargs, out=None):
        """Calls the op through the dispatcher; the op's own contract names what the dispatcher refuses."""
        self._check_kinds(args, kwargs)
        if torch.compiler.is_compiling():
            return overload(*args, **kwargs)
        try:
            if torch.is_inference_mode_enabled():
                return overload(*args, **kwargs)
            return _below_autograd(overload, self.names, args, kwargs)
        except (RuntimeError, TypeError, AssertionError, ValueError) as error:
            if not str(error).startswith(f"eagle_kernels.{self._op}:"):
                self._refuse(args, kwargs, out)
            raise

    def _refuse(self, args, kwargs, out) -> None:
        """Raises an error that names the argument at fault, if the op's contract finds one."""
        buffer_names = {"out_" + field for field in self._fields}
        given = {key: value for key, value in kwargs.items() if key not in buffer_names}
        refuse_names(self._op, self._signature.parameters, given)
        try:
            bound = self._signature.bind(*args, **given)
        except TypeError as error:
            placed = [name for name, each in self._signature.parameters.items() if each.kind is not each.KEYWORD_ONLY]
            rule = f", of which {', '.join(placed)} may be; give the others by name" if len(args) > len(placed) else ""
            raise TypeError(f"eagle_kernels.{self._op}: {error}{rule}") from None
        contract = self._module.contract({**self._defaults, **bound.arguments, "out": out})
        if out is not None:
            check.allocate(self._op, contract, out)
        if not _is_watched():
            refuse_without_data(self._op, bound.arguments)

    def _run(self, values: dict, out=None):
        """Computes by the backend of the tensors' device."""
        device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
        if device is not None and backend(device) == "triton":
            return self._launcher(**values, out=out) if self._returns else self._launcher(**values)
        contract = self._module.contract(check.OfReference(values, out=out))
        refuse_shared(self._op, values, getattr(self._module, "MUTATES", ()))
        if out is None:
            check.check_room(self._op, contract)
        else:
            out = check.allocate(self._op, contract, out)
            refuse_overlaps(self._op, values, out, self._fields, getattr(self._module, "IN_PLACE", {}))
        # a reference does not take what only a launcher needs to know, such as whether bits may depend on the batch
        values = {name: value for name, value in values.items() if name in self._reference_names}
        with undisturbed():
            result = self._reference(**values, **({"out": out} if "out" in self._reference_names else {}))
            if out is None:
                return result
            for target, source in zip(_flat(out), _flat(result)):
                target.copy_(source)
        return out

    def _infer(self, values: dict, out=None):
        """Checks a call whose tensors have only shapes; returns empty outputs of theirs, or `out`."""
        contract = self._module.contract({**values, "out": out})
        return None if contract is None else check.allocate(self._op, contract, out)

    def _functional(self, compute: Callable) -> Callable:
        def compute_it(*args, **kwargs):
            result = compute(self._bind(args, kwargs))
            return tuple(result) if self._result_type else result

        return compute_it

    def _into_buffers(self, compute: Callable) -> Callable:
        def compute_it(*args, **kwargs):
            out = tuple(kwargs.pop("out_" + field) for field in self._fields)
            compute(self._bind(args, kwargs), self._result_type(*out) if self._result_type else out[0])

        return compute_it

    def _bind(self, args, kwargs) -> dict:
        return {**self._defaults, **dict(zip(self.names, args)), **kwargs}


class Operator(Protocol[P, R, ReferenceP, ReferenceR]):
    """Types the public function of an op, with the op's reference as an attribute."""

    __name__: str

    @property
    def reference(self) -> Callable[ReferenceP, ReferenceR]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def with_reference(
    public: Callable[P, R], reference: Callable[ReferenceP, ReferenceR]
) -> Operator[P, R, ReferenceP, ReferenceR]:
    """Gives a public function its reference, and the name by which pickle finds it: that of the package."""
    public.reference, public.__module__ = reference, __name__.partition(".")[0]
    return public


# kinds of arguments that a launcher is given as they are; subclasses of Tensor are the dispatcher's
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})
_num_dispatch_modes, _num_function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def _goes_straight(args: tuple, kwargs: dict, buffers: tuple) -> bool:
    """Returns whether nobody but the launcher of a GPU waits for a call: no tracer, mode, transform or profiler."""
    if _is_watched():
        return False
    if not all(_PLAIN.issuperset(map(type, values)) for values in (args, kwargs.values(), buffers)):
        return False
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, *buffers, **kwargs):
        return False
    first = args[0] if args else next(iter(kwargs.values()), None)
    return isinstance(first, torch.Tensor) and not first.is_meta and backend(first.device) == "triton"


def _is_watched() -> bool:
    """Returns whether a mode, tracer, transform or profiler has to see calls."""
    return torch.compiler.is_compiling() or bool(
        _num_dispatch_modes()
        or _num_function_modes()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


def _below_autograd(overload, names: list[str], args: tuple, kwargs: dict):
    """Calls an op past autograd, which has nothing to record; raises RuntimeError where it would have.
    `names` are those of the positional arguments. Public functions do this by themselves, which takes half a
    microsecond: the dispatcher's way here takes four."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
        _refuse_derivative(
            overload, names, args, kwargs, lambda tensor: tensor.requires_grad,
            "not require grad, since ops have no derivatives (call it under torch.no_grad(), or pass "
            "tensor.detach()), got requires_grad=True",
        )  # fmt: skip
    if forward_ad._current_level >= 0:
        _refuse_derivative(
            overload, names, args, kwargs, _has_tangent,
            "not carry a tangent, since ops have no derivatives (pass its primal, or use the function's attribute "
            "`reference`), got a dual tensor",
        )  # fmt: skip
    with torch._C._AutoDispatchBelowAutograd():
        return overload(*args, **kwargs)


def _has_tangent(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_derivative(overload, names: list[str], args: tuple, kwargs: dict, is_wrong, rule: str) -> None:
    """Raises RuntimeError that names the first tensor that is wrong, if one is."""
    given = dict(zip(names, args)) | kwargs
    for key, value in given.items():
        if isinstance(value, torch.Tensor) and is_wrong(value):
            if key.startswith("out_"):
                key = "out" if key == "out_output" else "out." + key.removeprefix("out_")
            op = overload.name().partition("::")[2].partition(".")[0]
            raise RuntimeError(f"eagle_kernels.{op}: {key} must {rule}")


def _flat(result) -> tuple:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _declare(parameters, mutates):
    """Yields the schema text of each parameter, with `*` before the first keyword-only one."""
    keyword_only = False
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        kind = _SCHEMA_TYPES[str(parameter.annotation)]
        if parameter.name in mutates:
            kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + index)}!)")
        default = parameter.default
        if default is parameter.empty:
            yield f"{kind} {parameter.name}"
        elif isinstance(default, str):
            yield f'{kind} {parameter.name}="{str(default)}"'
        else:
            yield f"{kind} {parameter.name}={default}"
