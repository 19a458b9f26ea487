"""How triton 3.6 launches a kernel that it has compiled: by calls that are not public, and others in other versions."""

from collections.abc import Callable

# with any other version plans (`launch.py`) go through `kernel[grid](...)`
VERSIONS = ("3.6.",)


def launch_of(compiled, grid: tuple[int, ...], stream) -> tuple[Callable, list]:
    """Returns what launches a compiled kernel, and its arguments up to those of the kernel."""
    run, head = compiled.run, [*(*grid, 1, 1)[:3], stream, compiled.function]
    if type(run).__name__ == "CudaLauncher" and not (run.global_scratch_size or run.profile_scratch_size):
        # what CudaLauncher itself calls when a kernel needs no scratch memory
        head += [run.launch_cooperative_grid, run.launch_pdl, None, None]
        run = run.launch
    return run, [*head, compiled.packed_metadata, None, None, None]  # no hooks


def has_hooks(knobs) -> bool:
    """Returns whether anybody, such as a profiler, has hooked launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
