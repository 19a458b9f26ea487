"""The rule that a launcher checks, allocates and launches, and calls no other torch operator."""

import importlib
import re
from collections.abc import Collection

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kernels.runtime import launch as launch_module

_ALLOWED = {"empty", "empty_strided", "view", "_unsafe_view", "select", "slice", "detach", "as_strided", "unsqueeze"}


class _OnlyAllocations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name not in _ALLOWED:
            raise AssertionError(f"a launcher called the torch operator {function}")
        return function(*args, **(kwargs or {}))


def assert_only_launches(path: str, values: dict, launches: int | Collection[int] | None = None) -> None:
    """Runs the launcher with launches recorded instead of made: any torch operator but an allocation or a view fails.

    The number of launches must be `launches` or one of them, by default the first number of the docstring's `Launches`
    paragraph.
    """
    name = path.rpartition(".")[2]
    module = importlib.import_module("eagle_kernels.ops." + path)
    recorded = []
    with launch_module.intercept(lambda *record: recorded.append(record)), _OnlyAllocations():
        getattr(module, name)(**values)
    if launches is None:
        launches = int(re.search(r"^Launches:?\s+(\d+)", module.__doc__, re.MULTILINE).group(1))
    if len(recorded) not in ([launches] if isinstance(launches, int) else launches):
        raise AssertionError(f"{name}: {len(recorded)} launches, its docstring says {launches}")
    if torch.cuda.is_available():
        _assert_kernel_count(getattr(module, name), values, len(recorded))


def _assert_kernel_count(launcher, values: dict, launches: int) -> None:
    """What the GPU itself saw: `launches` kernels, no copies, no fills."""
    launcher(**values)  # compile first
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launcher(**values)
        torch.cuda.synchronize()
    seen = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if len(seen) != launches:
        raise AssertionError(f"{launches} launches expected, the GPU ran {len(seen)}: {seen}")
