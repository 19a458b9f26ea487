"""Ahead-of-time compilation of every kernel of an op for five GPUs, none of which need be here.

`python -m op_tests.harness.ahead_of_time compile tree.build_tree` runs in a child process without TRITON_INTERPRET.
The op's launcher is called with the arguments of `ahead_of_time_cases()` in its test module, once per target with that
target's tuning rows; its launches are recorded instead of made, compiled, and held against the target's limits. Prints
one JSON line per compiled kernel, and one per case that the launcher refuses for a target.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

OPS = Path(__file__).parent.parent.parent / "eagle_kernels" / "ops"
PATHS = sorted(f"{file.parent.name}.{file.stem}" for file in OPS.glob("*/*.py") if file.stem != "__init__")

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}


_begun: dict[str, Future] = {}
_pool: list[ThreadPoolExecutor] = []


def begin(paths: list[str]) -> None:
    """Starts compiling these ops on half of the cores, beside whatever follows.

    Torch keeps to the other half, as conftest.py says.
    """
    if not paths:
        return
    _pool.append(ThreadPoolExecutor(max(1, os.cpu_count() // 2)))
    _begun.update({path: _pool[0].submit(_run_child, "compile", path) for path in paths})


def end() -> None:
    """Gives up what has not been started."""
    while _pool:
        _pool.pop().shutdown(wait=False, cancel_futures=True)


def compile_for_all_targets(path: str, cases: str = "ahead_of_time_cases") -> list[dict]:
    """Compiles the op in a child process; one record per kernel, target and set of constants. Raises with its log.

    cases: the function of the op's test module that yields them; `full_ahead_of_time_cases` where there is one.

    A case that the launcher refuses for a target, by NotSupported, is a record with the key "refusal".

    Waits for one that was begun and is running; one that still stands in line is taken out of it.
    """
    if cases != "ahead_of_time_cases":
        return _run_child("compile", path, cases)
    if path in _begun and not _begun[path].cancel():
        return _begun[path].result()
    return _run_child("compile", path)


def count_variants(path: str) -> dict[str, int]:
    """How many variants of each kernel Triton would compile over `size_sweep()` of the op's test module."""
    found = _all_variants()[path]
    assert isinstance(found, dict), f"variants of {path} failed:\n{found}"
    return found


@functools.cache
def _all_variants() -> dict[str, dict[str, int] | str]:
    """For all ops, or the error: a child takes far longer to import torch than to count."""
    return dict(zip(PATHS, _run_child("variants", *PATHS)))


def _run_child(task: str, *arguments: str) -> list:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "op_tests.harness.ahead_of_time", task, *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode != 0:
        raise AssertionError(
            f"{task} of {', '.join(arguments)} failed:\n{child.stdout[-1000:]}\n{child.stderr[-4000:]}"
        )
    return [json.loads(line) for line in child.stdout.splitlines()]


def _compile(path: str, cases: str = "ahead_of_time_cases") -> None:
    from eagle_kernels.runtime import launch as launch_module
    from eagle_kernels.runtime import target

    category, _, name = path.rpartition(".")
    module = importlib.import_module("eagle_kernels.ops." + path)
    tests = importlib.import_module(f"op_tests.ops.{category}.test_{name}")
    done = set()
    for case, values in getattr(tests, cases)():
        for architecture in TARGETS:
            recorded: list[tuple] = []
            keep = recorded.append
            try:
                with target.assume(architecture), launch_module.intercept(lambda *launch, keep=keep: keep(launch)):
                    getattr(module, name)(**values)
            except target.NotSupported as refusal:
                print(json.dumps({"case": case, "target": architecture, "refusal": str(refusal)}), flush=True)
                continue
            for _, kernel, _, arguments in recorded:
                source, options = _source(kernel, arguments)
                key = (architecture, kernel.__name__, str(source.signature), str(source.constants), str(options))
                if key in done:
                    continue
                done.add(key)
                shared = _shared_memory(source, architecture, options)
                record = {"kernel": kernel.__name__, "case": case, "target": architecture, "shared_bytes": shared}
                print(json.dumps(record), flush=True)


def _print_variants(*paths: str) -> None:
    for path in paths:
        try:
            found = _variants_of(path)
        except Exception:  # of this op alone: the others are counted all the same
            found = traceback.format_exc()[-4000:]
        print(json.dumps(found), flush=True)


def _variants_of(path: str) -> dict[str, int]:
    from eagle_kernels.runtime import launch as launch_module
    from eagle_kernels.runtime import target

    category, _, name = path.rpartition(".")
    launcher = getattr(importlib.import_module("eagle_kernels.ops." + path), name)
    keys: dict[str, set] = {}

    def record(op, kernel, grid, arguments):
        keys.setdefault(kernel.__name__, set()).add(_specialisation(kernel, arguments))

    with target.assume("sm_90"), launch_module.intercept(record):
        for values in importlib.import_module(f"op_tests.ops.{category}.test_{name}").size_sweep():
            launcher(**values)
    return {kernel: len(variants) for kernel, variants in keys.items()}


def _specialisation(kernel, arguments) -> tuple:
    """What Triton's cache key holds: types, constants, and of other integers whether they are 1 or multiples of 16."""
    key = [(name, value) for name, value in arguments.items() if name not in {p.name for p in kernel.params}]
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
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

    signature, constants, attributes = {}, {}, {}
    names = [parameter.name for parameter in kernel.params]
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
    options = {key: value for key, value in arguments.items() if key not in names}
    return ASTSource(kernel, signature, constants, attributes), options


def _shared_memory(source, architecture: str, options: dict) -> int:
    import triton
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("gfx"):
        target = GPUTarget("hip", architecture, 64)
    else:
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    {"compile": _compile, "variants": _print_variants}[sys.argv[1]](*sys.argv[2:])
