"""Checks that all ops share: kinds of arguments, and buffers that overlap."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ParamSpec, TypeVar

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import check
from .values import shown, type_name

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = {
    "torch.Tensor": ("be a tensor", (torch.Tensor,)),
    "int": ("be an int", (int, torch.SymInt)),
    "float": ("be a number", (int, float, torch.SymInt, torch.SymFloat)),
    "bool": ("be True or False", (bool,)),
}


def host_kinds(op: str, parameters: Mapping[str, inspect.Parameter]) -> Callable[[tuple, dict], None]:
    """Returns a check of the kinds of a call's arguments; it raises TypeError, and knows no ranges.
    It sees every argument, also one that the op does not read for the others. Unlike PyTorch's dispatcher it takes no
    bool for a number, and no number for a bool."""
    wanted = []
    for index, parameter in enumerate(parameters.values()):
        kind = str(parameter.annotation).removesuffix(" | None")
        if kind in _KINDS:
            rule, kinds = _KINDS[kind]
            optional = (type(None),) if kind != parameter.annotation else ()
            wanted.append((index, parameter.name, rule, frozenset((*kinds, *optional)), kinds))

    def check_kinds(args: tuple, kwargs: dict) -> None:
        for index, name, rule, exact, kinds in wanted:
            if index < len(args):
                value = args[index]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            # subclasses pass, IntEnum for one; bool has none
            if type(value) not in exact and (isinstance(value, bool) or not isinstance(value, kinds)):
                got = shown(value) if kinds == (bool,) else type_name(value)
                check.Arguments(op, kwargs).fail(name, rule, got, TypeError)
            if type(value) is int and not -(2**63) <= value < 2**63:
                check.Arguments(op, kwargs).fail(name, "lie in -2^63..2^63 - 1", value)

    return check_kinds


def with_kinds(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a front door, which is not an op itself, in checks of the names and kinds of its arguments."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    check_kinds = host_kinds(name, parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_names(name, parameters, kwargs)
        check_kinds(args, kwargs)
        return function(*args, **kwargs)

    return call


def refuse_names(op: str, names: Collection[str], given: Iterable[str]) -> None:
    """Raises TypeError where a keyword names no argument of an op."""
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"eagle_kernels.{op}: got an unexpected keyword argument {shown(name)}{hint}")


def refuse_without_data(op: str, values: Mapping) -> None:
    """Raises ValueError where a tensor has only a shape, as those of the device meta and of torch.compile's traces."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
            check.Arguments(op, {}).fail(name, "hold data", "a FakeTensor" if isinstance(value, FakeTensor) else "meta")


def checked(function: Callable) -> Callable:
    """Wraps a launcher in the checks of a call without a plan. A plan knows the kinds of its arguments, but not whether
    buffers overlap: to check that in every call would cost what planning saves, and buffers that are mixed up are so in
    the first call. With EAGLE_KERNELS_DEBUG=1 nothing is planned, and every call is checked."""
    module, parameters = sys.modules[function.__module__], inspect.signature(function).parameters
    check_kinds, names = host_kinds(function.__name__, parameters), tuple(parameters)
    result_type, in_place = getattr(module, "Output", None), getattr(module, "IN_PLACE", {})
    mutates = getattr(module, "MUTATES", ())

    @functools.wraps(function)
    def call(*args, **kwargs):
        refuse_names(function.__name__, parameters, kwargs)
        check_kinds(args, kwargs)
        out, inputs = kwargs.get("out"), {**dict(zip(names, args)), **kwargs}
        inputs.pop("out", None)
        refuse_without_data(function.__name__, inputs)
        refuse_shared(function.__name__, inputs, mutates)
        if out is not None:
            refuse_overlaps(function.__name__, inputs, out, result_type._fields if result_type else (), in_place)
        return function(*args, **kwargs)

    return call


def refuse_overlaps(op: str, inputs: Mapping, out, fields: tuple[str, ...], in_place: Mapping) -> None:
    """Raises ValueError where a buffer of `out` shares memory with another one, with an input, or with itself.
    out: a tensor, or one for each field. in_place: for each field, or `out`, the inputs whose memory it may
    reuse; the op then reads an element before it writes it."""
    if isinstance(out, torch.Tensor):
        buffers = {"out": out}
    else:  # anything else is refused by the op's contract
        buffers = {
            f"out.{field}": buffer for field, buffer in zip(fields, out if isinstance(out, (tuple, list)) else ())
        }
    _refuse(op, {**inputs, **buffers}, buffers, in_place)


def refuse_shared(op: str, inputs: Mapping, mutates: tuple[str, ...]) -> None:
    """Raises ValueError where a tensor that an op works on in place shares memory with any other, or with itself."""
    buffers = {name: inputs[name] for name in mutates if inputs.get(name) is not None}
    if buffers:
        _refuse(op, inputs, buffers, {})


def _refuse(op: str, tensors: Mapping, buffers: Mapping, in_place: Mapping) -> None:
    """Raises ValueError where one of the buffers, which are among the tensors, overlaps what it must not."""
    spans = {name: _span(tensor) for name, tensor in tensors.items() if _has_memory(tensor)}
    for name in (name for name in buffers if name in spans):
        buffer, (begin, end) = buffers[name], spans.pop(name)
        if not _lie_apart(buffer) and _overlap(_pieces(buffer)):
            _fail(op, name, "not overlap itself", f"shape {list(buffer.shape)} with strides {list(buffer.stride())}")
        for other, (other_begin, other_end) in spans.items():
            if begin >= other_end or other_begin >= end:
                continue
            tensor, offset = tensors[other], f"an offset of {begin - other_begin} bytes"
            if _look_alike(buffer, tensor) and _lie_apart(buffer, (abs(begin - other_begin), 2)):
                continue
            if buffer.is_contiguous() and tensor.is_contiguous() or _overlap(_pieces(buffer), _pieces(tensor)):
                if other not in in_place.get(name.removeprefix("out."), ()):
                    _fail(op, name, f"not overlap {other}", offset)
                if not _are_one(buffer, tensor):
                    _fail(op, name, f"be {other} itself or not overlap it", offset)


def _fail(op: str, name: str, rule: str, got: str):
    raise ValueError(f"eagle_kernels.{op}: {name} must {rule}, got {got}")


def _has_memory(tensor) -> bool:
    return check.is_dense(tensor) and tensor.numel() > 0 and tensor.device.type != "meta"


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of its first byte and just past its last one."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.itemsize


def _look_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.itemsize) == (other.shape, other.stride(), other.itemsize)


def _lie_apart(tensor: torch.Tensor, *more: tuple[int, int]) -> bool:
    """Tells whether each axis steps past all elements of the axes that step less far, so that none overlap.
    more: further axes, (stride in bytes, size), as that from a tensor to another one of the same look. A pool is often
    millions of pieces, keys and values side by side in each head: to compare all of them would take seconds."""
    extent = tensor.itemsize
    axes = [(stride * tensor.itemsize, size) for size, stride in zip(tensor.shape, tensor.stride())]
    for stride, size in sorted([*axes, *more]):
        if size > 1:
            if stride < extent:
                return False
            extent += (size - 1) * stride
    return True


def _pieces(tensor: torch.Tensor) -> numpy.ndarray:
    """Returns the addresses of its contiguous pieces, from and to: [pieces, 2]."""
    axes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    length, places = 1, numpy.zeros(1, numpy.int64)
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    for stride, size in axes:
        places = (places[:, None] + stride * numpy.arange(size)).ravel()
    begin = tensor.data_ptr() + places * tensor.itemsize
    return numpy.stack([begin, begin + length * tensor.itemsize], axis=1)


def _overlap(*pieces: numpy.ndarray) -> bool:
    """Returns whether pieces of one tensor overlap each other, or those of two tensors."""
    if len(pieces) == 1:
        ordered = pieces[0][pieces[0][:, 0].argsort()]
        return bool((ordered[1:, 0] < ordered[:-1, 1]).any())
    one, other = (part[part[:, 0].argsort()] for part in pieces)
    # of the other's pieces that begin before this one ends, the latest end
    before = numpy.searchsorted(other[:, 0], one[:, 1], side="left") - 1
    last_end = numpy.maximum.accumulate(other[:, 1])
    return bool((last_end[before][before >= 0] > one[before >= 0, 0]).any())


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether both begin at one address, with the same dtype and strides."""
    strides = [[stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1] for tensor in (one, other)]
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and strides[0] == strides[1]
