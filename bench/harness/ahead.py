"""Compiles what benchmarks launch for a GPU that is not here, into Triton's cache: time on a GPU is then for timing.

The folder TRITON_CACHE_DIR serves the machine with the GPU under the same path, with the same Triton and the same
source files. Kernels that only make inputs are not in it.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kernels.runtime import launch, target

from .declaration import Benchmark, Case

_LARGE = 1 << 18  # elements of a tensor whose values no launcher looks at


class Compiler:
    """Compiles launches for one architecture. kernels: the hashes of all that were compiled."""

    def __init__(self, architecture: str):
        from triton import knobs
        from triton.runtime import driver

        self.architecture, self.kernels = architecture, set()
        driver.set_active(_Driver(architecture))
        knobs.compilation.store_binary_only = True

    def inputs(self, benchmark: Benchmark, case: Case) -> dict:
        """Returns the case's arguments, large ones without values."""
        with _Unfilled():
            return benchmark.inputs(case, torch.device("cpu"))

    def compile(self, benchmark: Benchmark, values: dict) -> None:
        """Compiles what the op would launch for these arguments, with a plan of attention or with addresses as well."""
        calls = [values]
        if "planned" in benchmark.providers and not values.get("deterministic"):
            calls.append(values | {"plan": torch.zeros(len(values["seq_lens"]) + 1, dtype=torch.int32)})
        if "addresses" in benchmark.providers:
            caches = {name: values[name][:1] for name in benchmark.mutates}
            addresses = torch.zeros(2, len(values["k_cache"]), dtype=torch.int64)
            calls.append(values | caches | {"cache_addresses": addresses})
        with target.assume(self.architecture), launch.intercept(self._keep):
            for arguments in calls:
                benchmark.unplanned(**arguments)

    def _keep(self, op: str, kernel, grid: tuple[int, ...], arguments: dict) -> None:
        if 0 not in grid:
            self.kernels.add(kernel.run(grid=grid, warmup=True, **arguments).hash)


class _Driver:
    """What Triton asks a driver of a GPU while it compiles."""

    def __init__(self, architecture: str):
        from triton.backends.compiler import GPUTarget

        is_amd, number = architecture.startswith("gfx"), architecture.removeprefix("sm_")
        self._target = GPUTarget("hip", architecture, 64) if is_amd else GPUTarget("cuda", int(number), 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Unfilled(TorchDispatchMode):
    """Allocates large tensors of random or of converted numbers and leaves them as they are."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(function).removesuffix(".default")
        if name in ("aten.randn", "aten.rand") and torch.Size(args[0]).numel() > _LARGE:
            return torch.empty(args[0], dtype=kwargs.get("dtype"))
        is_large = bool(args) and isinstance(args[0], torch.Tensor) and args[0].numel() > _LARGE
        if is_large and name == "aten.normal_":
            return args[0]
        if is_large and name == "aten._to_copy" and args[0].is_floating_point():
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        return function(*args, **kwargs)
