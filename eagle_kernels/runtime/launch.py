"""Launching kernels: the one way from Python to the GPU (or to Triton's interpreter), and a cheap one.

The first call of a launcher with given sizes checks its arguments, computes grids and constants, and launches through
Triton; all of that takes tens of microseconds and depends on nothing but what the arguments look like. So `launcher`
records it as a plan: the compiled kernels, their grids, and where each of their arguments came from. A later call whose
arguments look the same hands its own pointers straight to the compiled kernels; with another Triton than that of
triton_3_6.py it hands its tensors to Triton, and saves the checks alone.

"Look the same" means: the same dtype, sizes, strides, device and 16-byte alignment of every tensor (Triton compiles for
them), and the same value of every other argument.
"""

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch

from . import check, language, target, triton_3_6
from .calls import checked
from .recorded import Recorded, Tensors

# A launcher forgets its plans beyond this number; sizes that change at every call would fill the memory.
_MAX_PLANS = 1024
# How many of them a call is compared with first: the attention of a target and of its drafts take turns in a step.
_MAX_RECENT = 4

# a launcher keeps its signature for type checkers
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=tuple)

_interceptor: Callable | None = None


class _Recording(threading.local):
    launches: list | None = None


_recording = _Recording()


def launch(op: str, kernel, grid: tuple[int, ...], **arguments) -> None:
    """Runs `kernel` over `grid` on the device of its first tensor argument, whatever device is current.
    An empty grid launches nothing (B = 0 is a valid batch). Raises RuntimeError, naming `op`, where the machine cannot
    run Triton kernels on that device. The kernel's ENABLE_PDL follows from the device; products are fused into sums
    unless `enable_fp_fusion=False` is among the arguments, in every version of Triton."""
    device = next(value.device for value in _flat(arguments.values()) if isinstance(value, torch.Tensor))
    arguments["ENABLE_PDL"] = target.has_dependent_launch(device)
    if arguments["ENABLE_PDL"]:
        arguments["launch_pdl"] = True  # AMD's compiler does not know the word
    arguments.setdefault("enable_fp_fusion", True)  # the default up to triton 3.9; 3.10 changes it
    if _interceptor is not None:
        _interceptor(op, kernel, grid, arguments)
        return
    if 0 in grid:
        return
    if language.MISSING:
        raise RuntimeError(f"eagle_kernels.{op}: the triton backend needs {language.MISSING}")
    is_late = type(kernel).__name__ == "InterpretedFunction"  # while others are not
    if not language.is_interpreting() and (is_late or device.type == "cpu"):
        if language.wants_interpreter() or device.type != "cpu":
            raise RuntimeError(
                f"eagle_kernels.{op}: TRITON_INTERPRET=1 was set after the first kernel was imported, too late; set it "
                "before the first import of eagle_kernels"
            )
        raise RuntimeError(
            f"eagle_kernels.{op}: the triton backend cannot run on cpu tensors; move them to a GPU, set "
            "TRITON_INTERPRET=1 before the first import, or use EAGLE_KERNELS_BACKEND=reference"
        )
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled = kernel[grid](**arguments)
    launches = _recording.launches
    if launches is not None:
        launches.append(Recorded(kernel, compiled, grid, arguments))


def bundle(kind: type[T], values: dict) -> T:
    """Returns the arguments of an op that travel together into a kernel, by the names of the named tuple `kind`."""
    return kind._make(map(values.get, kind._fields))


def _flat(values: Iterable) -> Iterator:
    """Yields the values, and those of bundles one by one."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def launcher(function: Callable[P, R]) -> Callable[P, R]:
    """Makes the launcher of an op cheap to call again: see the module's docstring.
    Its attribute `again(args, kwargs)` makes a call that looks like one of the last few, and returns (its result,); it
    returns () for any other call, and for one of which autograd would have to know."""
    function = checked(function)
    plans: dict[tuple, _Plan] = {}
    recent: tuple[_Plan, ...] = ()  # most calls look like one of these

    def again(args: tuple, kwargs: dict) -> tuple:
        if not recent or not _can_plan():
            return ()
        for plan in recent:
            tensors = plan.tensors_of(args, kwargs)
            if tensors is not None:
                break
        else:
            return ()
        if plan.requires_grad and torch.is_grad_enabled():
            return ()
        pointers = list(map(_data_ptr, tensors))
        return (plan.run(tensors, pointers, kwargs),) if plan.accepts(pointers) else ()

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal recent
        done = again(args, kwargs)
        if done:
            return done[0]
        if not _can_plan():
            return function(*args, **kwargs)
        plain, tensors = _split(args, kwargs)
        if plain is None:
            return function(*args, **kwargs)
        pointers = list(map(_data_ptr, tensors))
        signature = (*plain, *map(_look, tensors, pointers), _repeats(tensors))
        plan = plans.get(signature)
        if plan is None:
            result, plan = _record(function, args, kwargs, tensors, pointers)
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plans[signature] = plan or False  # what cannot be planned is not tried again
            return result
        if plan is False:
            return function(*args, **kwargs)
        if plan in recent:  # the same but for torch's state, inference mode for one
            plan.guard(tensors)
        elif plan.guards is not None and _all_aligned(pointers):
            recent = (plan, *recent[: _MAX_RECENT - 1])
        return plan.run(tensors, pointers, kwargs)

    call.again = again
    return call


@contextlib.contextmanager
def intercept(function: Callable):
    """Hands every launch to `function(op, kernel, grid, arguments)` instead of running it; for the test harness."""
    global _interceptor
    before, _interceptor = _interceptor, function
    try:
        yield
    finally:
        _interceptor = before


@dataclasses.dataclass(slots=True, eq=False)
class _Plan:
    """What a launcher does for one signature. Tensors count: those of the call in order, then the allocated ones."""

    # how a call must look
    num_args: int
    names: tuple  # of the keyword arguments
    out_type: type
    plain_of: Callable  # picks what is no tensor out of the call's values, `out` unpacked at the end
    plain: tuple
    plain_types: list
    picked: Callable  # the tensors likewise
    repeats: tuple  # see _repeats
    distinct_of: Callable  # picks each tensor once out of the tensors
    # what it does
    device: int
    current_stream: Callable | None  # of a device index; None where Triton launches, and asks itself
    allocated: tuple  # (shape, strides, dtype) of each
    launches: tuple
    result: tuple | int | None  # indices of tensors
    result_type: type | None  # the named tuple around them
    # torch's own check of dtypes, sizes, strides, devices and requires_grad; None where this torch has none
    guards: object = None
    requires_grad: bool = False
    # the arguments of the kernels in the call before: (stream, addresses, [(run, arguments), ...])
    before: tuple = (None, [], [])

    def guard(self, tensors: list) -> None:
        """Remembers what these tensors look like to torch."""
        self.guards, self.requires_grad = _guards(tensors), any(tensor.requires_grad for tensor in tensors)

    def tensors_of(self, args: tuple, kwargs: dict) -> tuple | None:
        """Returns the tensors of a call that differs from this plan's in addresses alone, else None."""
        if len(args) != self.num_args or tuple(kwargs) != self.names:
            return None
        values = [*args, *kwargs.values()]
        out = kwargs.get("out")
        if type(out) is not self.out_type:
            return None
        if isinstance(out, tuple):
            values += out
        plain = self.plain_of(values)
        if [*map(type, plain)] != self.plain_types or plain != self.plain:
            return None
        tensors = distinct = self.picked(values)
        if self.repeats:
            if not all(tensors[place] is tensors[earlier] for place, earlier in self.repeats):
                return None
            distinct = self.distinct_of(tensors)
        return tensors if self.guards.check(*distinct) else None

    def accepts(self, pointers: list) -> bool:
        """Returns whether these addresses are aligned as this plan, which may be a recent one, needs them."""
        return pointers == self.before[1] or _all_aligned(pointers)

    def run(self, tensors: Sequence, pointers: list, kwargs: dict):
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(tensors, pointers, kwargs)
        if self.allocated:
            fresh = [_empty(*spec) for spec in self.allocated]
            tensors, pointers = [*tensors, *fresh], [*pointers, *map(_data_ptr, fresh)]
        if self.current_stream is None:
            for run, of, constants in self.launches:
                run(*of(None, constants, tensors))
        else:
            stream = self.current_stream(self.device)
            stream_before, pointers_before, calls = self.before
            if pointers != pointers_before or stream != stream_before:
                calls = [(run, of(stream, constants, pointers)) for run, of, constants in self.launches]
                self.before = stream, pointers, calls
            for run, arguments in calls:
                run(*arguments)
        out = kwargs.get("out")
        if out is not None:
            return out
        if self.result_type is not None:
            return self.result_type._make([tensors[index] for index in self.result])
        return None if self.result is None else tensors[self.result]


@functools.cache
def _knows_triton() -> bool:
    is_there = language.MISSING is None and not language.is_interpreting()
    return is_there and language.triton.__version__.startswith(triton_3_6.VERSIONS)


def _can_plan() -> bool:
    """Returns whether calls may be planned: not under the test harness, within another launcher, for profilers that
    hook into launches which we would make past them, or where every call is to be checked."""
    if _interceptor is not None or check.DEBUG or _recording.launches is not None or torch.compiler.is_compiling():
        return False
    return not (_knows_triton() and triton_3_6.has_hooks(language.triton.knobs))


def _all_aligned(pointers: list) -> bool:
    return functools.reduce(operator.or_, pointers) % 16 == 0


_TENSORS, _data_ptr = (torch.Tensor, torch.nn.Parameter), torch.Tensor.data_ptr
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# on the current device, as the compiled programs of torch allocate, in a third of the time of torch.empty
_empty = torch._C._dynamo.guards._empty_strided_cuda


def _split(args: tuple, kwargs: dict) -> tuple[list | None, list]:
    """Returns what of a call is no tensor, by value, and its tensors; (None, ...) if one of them cannot be planned."""
    plain, tensors = [len(args), *kwargs], []
    values = [*args, *kwargs.values()]
    for value in values:
        kind = type(value)
        plain.append(kind)
        if kind in _TENSORS:
            tensors.append(value)
        elif isinstance(value, (int, float, str)) or value is None:
            plain.append(value)
        elif isinstance(value, tuple):  # out: its tensors are looked at last
            values += value
        else:  # another subclass of Tensor, or a mistake
            return None, tensors
    if not tensors or tensors[0].get_device() < 0:
        return None, tensors
    return plain, tensors


def _look(tensor: torch.Tensor, pointer: int) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), pointer % 16 == 0


def _repeats(tensors: list) -> tuple:
    """Returns (place, earlier place) of each tensor that occurs twice, as when an op works in place.
    A plan takes the two for one, which only a call that repeats them likewise may do."""
    places: dict[int, int] = {}
    pairs = ((place, places.setdefault(id(tensor), place)) for place, tensor in enumerate(tensors))
    return tuple(pair for pair in pairs if pair[0] != pair[1])


def _record(function: Callable, args: tuple, kwargs: dict, tensors: list, pointers: list) -> tuple:
    """Returns the launcher's result, and the plan of what it did: None if the arguments alone do not determine that."""
    _recording.launches = launches = []
    try:
        result = function(*args, **kwargs)
    finally:
        _recording.launches = None
    out = kwargs.get("out")
    if not launches or (out is not None and result is not out):
        return result, None
    known, knows = Tensors(tensors, pointers), _knows_triton()
    try:
        planned = tuple(map(known.launch if knows else known.launch_by_triton, launches))
        if result is None or isinstance(result, torch.Tensor):
            result_type, index = None, None if result is None else known.index(result)
        else:
            result_type, index = type(result), tuple(map(known.index, result))
    except LookupError:
        return result, None
    values = [*args, *kwargs.values(), *(out if isinstance(out, tuple) else ())]
    repeats = _repeats(tensors)
    is_plain = [not isinstance(value, (torch.Tensor, tuple)) for value in values]
    plain = _picker([at for at, plainly in enumerate(is_plain) if plainly])
    plan = _Plan(
        num_args=len(args), names=tuple(kwargs), out_type=type(out),
        plain_of=plain, plain=plain(values), plain_types=[*map(type, plain(values))],
        picked=_picker([at for at, value in enumerate(values) if isinstance(value, torch.Tensor)]),
        repeats=repeats, distinct_of=_picker([place for place in range(len(tensors)) if place not in dict(repeats)]),
        device=tensors[0].get_device(),
        current_stream=language.triton.runtime.driver.active.get_current_stream if knows else None,
        allocated=tuple(known.allocated), launches=planned, result=index, result_type=result_type,
    )  # fmt: skip
    plan.guard(tensors)
    return result, plan


def _picker(places: list[int]) -> Callable:
    """Returns a function that picks these places out of a list, always as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _guards(tensors: list):
    """Returns the check that torch.compile makes of its inputs: it takes a twentieth of the time of the same in Python.
    Each tensor is given once: the check fails if it meets one again."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    try:
        return torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
    except (AttributeError, TypeError, ValueError):
        return None
