"""Ahead-of-time compilation of every kernel of an op for five GPUs, none of which need be here.

It happens in one child process, started without TRITON_INTERPRET: a kernel is bound to the interpreter or to the
compiler when it is imported. The op's launcher is called with the arguments of `ahead_of_time_cases()` in its test
module, once per target with that target's tuning rows; its launches are recorded, not made, and compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import re
import struct
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .in_flight import overwritten, waits_of_ptxas

OPS = Path(__file__).parent.parent.parent / "eagle_kernels" / "ops"
PATHS = sorted(f"{file.parent.name}.{file.stem}" for file in OPS.glob("*/*.py") if file.stem != "__init__")

MAKERS = (("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx950"))
TARGETS = tuple(target for targets in MAKERS for target in targets)
# What is compiled: every variant of a kernel for every target; each kernel for one target of each maker in turn; each
# kernel once, for one target in turn.
PARTS = ("full", "short", "smoke")

_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32", torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}  # fmt: skip


def compile_for_targets(path: str, part: str, cases: str = "ahead_of_time_cases") -> list[dict]:
    """Compiles the op's kernels and returns a record of each: kernel, case, target, and bytes of shared memory and
    of slow memory for what a thread's registers do not hold; maxima of fp16; for Hopper also what `in_flight.py` finds.

    part: one of PARTS. cases: the function of the op's test module that yields them. A case that the launcher refuses
    for a target, by NotSupported, is a record with the key "refusal"; all are tried, whatever the part.
    """
    return _in_child(_compile, path, part, cases)


def count_variants(path: str) -> dict[str, int]:
    """Counts the variants of each kernel that Triton would compile over `size_sweep()` of the op's test module."""
    return _in_child(_variants_of, path)


def _in_child(function, *arguments):
    with _without_interpreter():  # the first call starts the child, which inherits this environment
        future = _child().submit(function, *arguments)
    return future.result()


@functools.cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_as_beside_sglang)


def _as_beside_sglang():
    """Replaces what importing SGLang replaces in Triton: kernels must not need it."""
    import triton

    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


@contextlib.contextmanager
def _without_interpreter():
    wanted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if wanted is not None:
            os.environ["TRITON_INTERPRET"] = wanted


def module_of_tests(path: str):
    """Returns the test module of an op, which declares its cases."""
    return importlib.import_module("op_tests.ops.{}.test_{}".format(*path.split(".")))


def _launcher(path: str):
    return getattr(importlib.import_module("eagle_kernels.ops." + path), path.rpartition(".")[2])


def _in_turn(by_target: dict[str, _Launch], targets: tuple[str, ...], number: int) -> _Launch | None:
    """Returns the launch for the number-th of these targets, or the next one that has a launch."""
    first = number % len(targets)
    return next((by_target[target] for target in targets[first:] + targets[:first] if target in by_target), None)


def _compile(path: str, part: str, cases: str) -> list[dict]:
    turn = PATHS.index(path)
    variants, records = _variants(path, cases)
    for variants_of_kernel in variants.values():
        if part == "full":
            wanted = [launch for by_target in variants_of_kernel for launch in by_target.values()]
        else:
            first = {target: launch for by_target in variants_of_kernel[::-1] for target, launch in by_target.items()}
            makers = MAKERS if part == "short" else (TARGETS,)
            wanted = [_in_turn(first, targets, turn) for targets in makers]
        records += [launch.compile() for launch in wanted if launch is not None]
    return records


class _Launch(NamedTuple):
    kernel: str
    case: str
    target: str
    source: Any
    options: dict

    def compile(self) -> dict:
        compiled = _compile_source(self.source, self.target, self.options)
        record = {"kernel": self.kernel, "case": self.case, "target": self.target}
        record |= {"shared_bytes": compiled.metadata.shared, "spilled_bytes": _spilled_bytes(compiled)}
        ptx = compiled.asm.get("ptx", "")
        # ptxas gets some of them wrong, see `ordering.widened`
        record["maxima_of_fp16"] = sorted(set(re.findall(r"\b(?:max|min)(?:\.\w+)*\.f16(?:x2)?\b", ptx)))
        if self.target == "sm_90":
            record |= {"overwritten": overwritten(ptx), "waits": waits_of_ptxas(ptx)}
        return record


def _variants(path: str, cases: str) -> tuple[dict[str, list[dict[str, _Launch]]], list[dict]]:
    """Returns each kernel's variants, as {target: launch}, and a record of each refusal.

    A launch that several cases share is listed once, with the first of them.
    """
    from eagle_kernels.runtime import launch as launch_module
    from eagle_kernels.runtime import target

    variants: dict[str, list[dict[str, _Launch]]] = {}
    refusals, known = [], set()
    for case, values in getattr(module_of_tests(path), cases)():
        found: dict[tuple[str, int], dict[str, _Launch]] = {}
        for architecture in TARGETS:
            recorded: list[tuple] = []
            keep = recorded.append
            try:
                with target.assume(architecture), launch_module.intercept(lambda *launch, keep=keep: keep(launch)):
                    _launcher(path)(**values)
            except target.NotSupported as refusal:
                refusals.append({"case": case, "target": architecture, "refusal": str(refusal)})
                continue
            for number, (_, kernel, _, arguments) in enumerate(recorded):
                source, options = _source(kernel, arguments)
                name = kernel.__name__
                key = (architecture, name, str(source.signature), str(source.constants), str(options))
                if key not in known:
                    known.add(key)
                    launch = _Launch(name, case, architecture, source, options)
                    found.setdefault((name, number), {})[architecture] = launch
        for (name, _), by_target in found.items():
            variants.setdefault(name, []).append(by_target)
    return variants, refusals


def _variants_of(path: str) -> dict[str, int]:
    from eagle_kernels.runtime import launch as launch_module
    from eagle_kernels.runtime import target

    keys: dict[str, set] = {}

    def record(op, kernel, grid, arguments):
        keys.setdefault(kernel.__name__, set()).add(_specialisation(kernel, arguments))

    with target.assume("sm_90"), launch_module.intercept(record):
        for values in module_of_tests(path).size_sweep():
            _launcher(path)(**values)
    return {kernel: len(variants) for kernel, variants in keys.items()}


def _specialisation(kernel, arguments) -> tuple:
    """What Triton's cache key holds: types, constants, and of other integers whether they are 1 or multiples of 16."""
    key = [(name, value) for name, value in arguments.items() if name not in {p.name for p in kernel.params}]
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if isinstance(value, tuple):
            key.append((parameter.name, *(getattr(pointer, "dtype", pointer) for pointer in value)))
        elif isinstance(value, torch.Tensor):
            key.append((parameter.name, value.dtype))
        elif parameter.is_constexpr or not isinstance(value, int):
            key.append((parameter.name, value if parameter.is_constexpr else type(value)))
        elif parameter.do_not_specialize:
            key.append((parameter.name, abs(value) < 2**31))
        else:
            key.append((parameter.name, abs(value) < 2**31, value == 1, value % 16 == 0))
    return tuple(key)


def _source(kernel, arguments):
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    signature, constants, attributes = {}, {}, {}
    names = [parameter.name for parameter in kernel.params]

    def describe(value, place: tuple[int, ...], is_constant: bool):
        """Returns the type of an argument, or of a pointer of a bundle, in the words of Triton."""
        if is_constant or value is None:
            constants[place] = value
            return "constexpr"
        if isinstance(value, tuple):
            return type(value)._make(describe(each, (*place, at), False) for at, each in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[place] = [["tt.divisibility", 16]]
            return _POINTERS[value.dtype]
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{_POINTERS[value.base.dtype].removeprefix('*')}{value.block_shape}>"
        if isinstance(value, float):
            return "fp32"
        return "i32" if abs(value) < 2**31 else "i64"

    for index, parameter in enumerate(kernel.params):
        signature[parameter.name] = describe(arguments[parameter.name], (index,), parameter.is_constexpr)
    options = {key: value for key, value in arguments.items() if key not in names}
    return ASTSource(kernel, signature, constants, attributes), options


def _compile_source(source, architecture: str, options: dict):
    import triton
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("gfx"):
        target = GPUTarget("hip", architecture, 64)
        if triton.__version__.startswith("3.4."):  # which brings no linker for AMD: its input is compiled all the same
            from triton.backends.amd.compiler import HIPBackend

            HIPBackend.path_to_rocm_lld = staticmethod(lambda: "true")
    else:
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=options)


def _spilled_bytes(compiled) -> int:
    """Returns how many bytes of slow memory a thread has for what its registers do not hold.

    On AMD the assembly says it. A cubin has records of (format, attribute, size or value, payload): attribute 0x11 is
    the size of a kernel's stack frame, after the index of its symbol.
    """
    if "amdgcn" in compiled.asm:
        return max(map(int, re.findall(r"\.private_segment_fixed_size: (\d+)", compiled.asm["amdgcn"])))
    sizes, records = [], _section(compiled.asm["cubin"], b".nv.info")
    while records:
        form, attribute, size = struct.unpack_from("<BBH", records)
        if attribute == 0x11:
            sizes.append(struct.unpack_from("<I", records, 8)[0])
        records = records[4 + (size if form == 4 else 0) :]
    return max(sizes)


def _section(elf: bytes, wanted: bytes) -> bytes:
    (first,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, first + size * number) for number in range(count)]
    start = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if elf[start + name :].split(b"\0", 1)[0] == wanted:
            return elf[offset : offset + length]
    raise ValueError(f"no section {wanted.decode()}")
