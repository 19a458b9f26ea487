"""Argument contracts: what an op accepts and what it returns, and every error text about it. A contract is written once
per op, `contract(values) -> Spec or NamedTuple of Spec`, and serves the launcher, the reference backend and the shape
inference of torch.compile alike."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import variables
from .values import shown, type_name

variables.warn_of_unknown()

# Checks of values, which wait for the device; read once, so that a launch that needs no check pays for none.
_DEBUG = os.environ.get("EAGLE_KERNELS_DEBUG", "")
if _DEBUG not in ("", "0", "1"):
    raise ValueError(f"EAGLE_KERNELS_DEBUG must be 0 or 1, got {shown(_DEBUG)}")
DEBUG = _DEBUG == "1"

INTEGER = (torch.int32, torch.int64)
MAX_INT32 = 2**31 - 1
_MANY_BYTES = 2**30
# what a reference needs for its outputs, as a multiple of their bytes: copies, and Python's lists of integers
_TIMES_OUTPUTS, _TIMES_INTEGERS = 2, 8
_LONGEST_VALUE = 100  # characters of a value in an error
FLOAT = (torch.float16, torch.bfloat16, torch.float32)
Shape = Sequence[str | int | None]  # an axis is a name, an exact size, or None for any size


class Spec(NamedTuple):
    """Shape, dtype and device of one output; `contiguous` trailing axes of an `out` buffer have no gaps (None: all)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: int | None = None


class OfReference(dict):
    """The arguments of a call that a reference is to compute."""


class Arguments:
    """Checks of the arguments of one call; each error names the op, the argument, the rule and the value.
    Axes are named: the first tensor that shows an axis (`"B"`) binds its size, later ones must agree.
    All tensors must be on one device."""

    def __init__(self, op: str, values: dict):
        self.op = op
        self.values = values
        self.device: torch.device | None = None
        self._device_of = ""
        self._sizes: dict[str, tuple[int, str]] = {}

    def fail(self, name: str, rule: str, got, kind: type[Exception] = ValueError):
        raise kind(f"eagle_kernels.{self.op}: {name} must {rule}, got {shown(got, str, _LONGEST_VALUE)}")

    def bind(self, axis: str, size: int, source: str) -> None:
        """Binds the size of a named axis that follows from an argument, but is none of its axes."""
        self._sizes.setdefault(axis, (size, source))

    def size(self, axis: str) -> int:
        """Returns the size bound to a named axis."""
        return self._sizes[axis][0]

    def tensor(
        self, name: str, shape: Shape, dtypes: Sequence[torch.dtype], *, optional: bool = False,
        contiguous: int | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Checks and returns a tensor of this shape. `contiguous` counts the trailing axes that must be laid out
        without gaps (1: unit stride of the last axis); None means all of them."""
        value = self.values.get(name)
        if value is None and optional:
            return None
        if not isinstance(value, torch.Tensor):
            self.fail(name, "be a tensor", type_name(value), TypeError)
        if not is_dense(value):
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").lstrip("_")
            self.fail(name, "be a dense tensor", f"a {layout} one")
        if value.is_neg():
            self.fail(name, "hold its own values, see torch.resolve_neg", "a view that negates another tensor")
        if value.dtype not in dtypes:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            self.fail(name, f"have dtype {allowed}", str(value.dtype).removeprefix("torch."))
        if self.device is None:
            self.device, self._device_of = value.device, name
        elif value.device != self.device:
            self.fail(name, f"be on {self.device} like {self._device_of}", value.device)
        if value.dim() != len(shape):
            self.fail(name, f"have shape {_shape_text(shape)}", list(value.shape))
        for axis, (expected, actual) in enumerate(zip(shape, value.shape)):
            if isinstance(expected, str):
                bound, source = self._sizes.setdefault(expected, (actual, name))
                if bound != actual:
                    self.fail(
                        name, f"have {expected} = {bound} in axis {axis} (as {source})", f"shape {list(value.shape)}"
                    )
            elif expected is not None and actual != expected:
                self.fail(name, f"have shape {_shape_text(shape)}", list(value.shape))
        self._check_layout(name, value, value.dim() if contiguous is None else contiguous)
        return value

    def _check_layout(self, name: str, value: torch.Tensor, trailing: int) -> None:
        expected = 1
        for axis in range(value.dim() - 1, value.dim() - 1 - trailing, -1):
            if value.shape[axis] != 1 and value.stride(axis) != expected and value.numel() > 0:
                rule = "be contiguous" if trailing == value.dim() else f"be contiguous in its last {trailing} axes"
                self.fail(name, rule, f"shape {list(value.shape)} with strides {list(value.stride())}")
            expected *= value.shape[axis]

    def integer(self, name: str, low: int, high: float | None = None) -> int:
        """Checks and returns an int in low..high (both included); without `high` it is one that int32 holds."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            self.fail(name, "be an int", type_name(value), TypeError)
        most = MAX_INT32 if high is None else high
        if value < low and high in (None, math.inf):
            self.fail(name, f"be at least {low}", value)
        if value < low or value > most:
            self.fail(name, f"lie in {low}..{most}", value)
        return value

    def number(self, name: str, low: float | None = None) -> float:
        """Checks and returns an int or a float of at least `low`, neither NaN nor infinite."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            self.fail(name, "be a number", type_name(value), TypeError)
        if not -math.inf < value < math.inf:
            self.fail(name, "be a finite number", value)
        if low is not None and value < low:
            self.fail(name, f"be at least {low}", value)
        return value

    def choice(self, name: str, options: Sequence[str]) -> str:
        """Checks and returns one of the listed strings."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in options:
            self.fail(name, "be one of " + ", ".join(repr(str(option)) for option in options), shown(value))
        return value

    def exactly_one(self, *names: str) -> str:
        """Checks that exactly one of these arguments is given; returns its name."""
        given = [name for name in names if self.values.get(name) is not None]
        if len(given) != 1:
            self.fail(f"exactly one of {' and '.join(names)}", "be given", " and ".join(given) or "none of them")
        return given[0]

    def debug(self, name: str, rule: str, holds, rows: torch.Tensor | None = None, of_reference: bool = False) -> None:
        """Checks `holds()`, a tensor of truths, only with EAGLE_KERNELS_DEBUG=1: it waits for the device.
        rows: which rows of the argument those of `holds()` are. None: the same. of_reference: it is always checked
        for a reference, which reads the values anyway."""
        if can_read(self.values[name], of_reference and isinstance(self.values, OfReference)):
            wrong = (~holds()).nonzero()
            if len(wrong):
                first, *rest = wrong[0].tolist()
                at = (first if rows is None else int(rows[first]), *rest)
                self.fail(name, rule, f"{self.values[name][at].item()} at {list(at)}")

    def debug_numbers(self, name: str, low: float | None = None) -> None:
        """Checks with `debug` that a tensor, if it is given, holds numbers of at least `low` and no NaN."""
        value = self.values[name]
        if value is not None and low is None:
            self.debug(name, "be a number", lambda: ~value.isnan())
        elif value is not None:
            self.debug(name, f"be a number of at least {low:g}", lambda: value >= low)

    def integers(self, shape: tuple[int, ...], position: int, *, default=torch.int32, contiguous=None) -> Spec:
        """Returns the spec of integers, of the default dtype or of that which `out` holds at this position."""
        given = self.buffer(position)
        dtype = given.dtype if isinstance(given, torch.Tensor) and given.dtype in INTEGER else default
        return self.spec(shape, dtype, contiguous=contiguous)

    def buffer(self, position: int):
        """Returns what `out` holds at this position, whatever that is, or None."""
        out = self.values.get("out")
        return out[position] if isinstance(out, (tuple, list)) and position < len(out) else None

    def spec(self, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: int | None = None) -> Spec:
        """Returns the spec of an output on the device of the arguments."""
        return Spec(shape, dtype, self.device, contiguous)


def allocate(op: str, contract, out=None):
    """Returns empty outputs for a contract, or the caller's `out` buffers after checking them against it."""
    single = isinstance(contract, Spec)
    specs = (contract,) if single else contract
    names = ("out",) if single else [f"out.{field}" for field in contract._fields]
    if out is None:
        buffers = [_empty(op, name, spec) for name, spec in zip(names, specs)]
        return buffers[0] if single else type(contract)(*buffers)
    buffers = (out,) if single else unpack(op, out, len(specs))
    for name, spec, buffer in zip(names, specs, buffers):
        args = Arguments(op, {name: buffer})
        args.device, args._device_of = spec.device, "the inputs"
        args.tensor(name, spec.shape, (spec.dtype,), contiguous=spec.contiguous)
    return out if single or isinstance(out, type(contract)) else type(contract)(*buffers)


def _empty(op: str, name: str, spec: Spec) -> torch.Tensor:
    """Returns an empty output; on the CPU, raises ValueError where there is no memory for it."""
    try:
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    except torch.OutOfMemoryError:  # of a GPU: its own message says what would help
        raise
    except (RuntimeError, TypeError, OverflowError, MemoryError):
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        Arguments(op, {}).fail(name, "fit into memory", f"shape {list(spec.shape)}, which is {num_bytes} bytes")


def check_room(op: str, contract) -> None:
    """Checks that there is memory for outputs which a reference will allocate by itself."""
    if contract is None:
        return
    specs = {"out": contract} if isinstance(contract, Spec) else contract._asdict()
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in specs.items()}
    if sum(sizes.values()) < _MANY_BYTES:
        return
    # before any is asked for: systems promise memory that they do not have
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    times = {name: _TIMES_INTEGERS if spec.dtype in INTEGER else _TIMES_OUTPUTS for name, spec in specs.items()}
    if sum(size * times[name] for name, size in sizes.items()) > memory:
        name = max(sizes, key=sizes.get)
        rule = f"fit {times[name]} times into the memory of {memory} bytes, as the reference needs it"
        got = f"shape {list(specs[name].shape)}, which is {sizes[name]} bytes"
        Arguments(op, {}).fail(name if name == "out" else f"out.{name}", rule, got)
    allocate(op, contract)


def unpack(op: str, out, count: int) -> tuple:
    """Returns the buffers of an op that has several outputs."""
    buffers = tuple(out) if isinstance(out, (tuple, list)) else ()
    if len(buffers) != count:
        got = len(buffers) if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"eagle_kernels.{op}: out must hold {count} tensors, got {got}")
    return buffers


def is_dense(value) -> bool:
    """Returns whether a value is a tensor with strides."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def can_read(tensor: torch.Tensor, is_wanted: bool = False) -> bool:
    """Returns whether checks of a tensor's values are wanted (EAGLE_KERNELS_DEBUG=1 at the first import) and possible.

    is_wanted: they are wanted in any case.

    They are not while torch.compile traces or on the device meta, where tensors have no values, nor while a CUDA graph
    is captured.
    """
    if not (DEBUG or is_wanted) or type(tensor) is not torch.Tensor or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join("*" if axis is None else str(axis) for axis in shape) + "]"
