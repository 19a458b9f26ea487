"""The check before any number: every provider against the reference, on the timed inputs where possible."""

import inspect

import torch

from .declaration import Benchmark, Case, Prepare

# Largest |error| / (1 + |expected|) per dtype of the output; of 8-bit floats one step.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2,
             torch.float8_e4m3fn: 0.13, torch.float8_e4m3fnuz: 0.13}  # fmt: skip


class Mismatch(Exception):
    """A provider's result differs from the reference's."""


def expected_outputs(benchmark: Benchmark, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """What the reference makes of the case's inputs."""
    values = benchmark.inputs(case, device)
    # what only changes how kernels work, `deterministic` or `prefetch_weight`, it does not know
    known = inspect.signature(benchmark.reference).parameters
    given = {name: value for name, value in values.items() if name in known}
    return _named(benchmark, benchmark.reference(**given), values)


def check_provider(
    benchmark: Benchmark, case: Case, prepare: Prepare, expected: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Raises Mismatch unless all outputs that the provider returns agree: integers exactly, floats within tolerance.

    A provider may leave outputs out that it does not compute, or computes with other random numbers.
    """
    values = benchmark.inputs(case, device)
    actual = _named(benchmark, prepare(values)(), values)
    for name, tensor in actual.items():
        want = expected[name]
        if tuple(tensor.shape) != tuple(want.shape):
            raise Mismatch(f"{name}: shape {list(tensor.shape)}, expected {list(want.shape)}")
        if want.is_floating_point():
            # equal infinities have no difference, NaN agrees with nothing
            error = (tensor.float() - want.float()).abs() / (1.0 + want.float().abs())
            wrong = ~((error <= TOLERANCE[want.dtype]) | (tensor == want))
        else:
            wrong = tensor.to(torch.int64) != want.to(torch.int64)
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise Mismatch(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, "
                f"first at {list(where)}: {tensor[where].item()}, expected {want[where].item()}"
            )


def _named(benchmark: Benchmark, result: object, values: dict) -> dict[str, torch.Tensor]:
    """Outputs by name, whichever form a provider returns them in, and what the op worked on in place."""
    changed = {name: values[name] for name in benchmark.mutates}
    if result is None:
        return changed
    if isinstance(result, dict):
        return result | changed
    if isinstance(result, torch.Tensor):
        return {"output": result} | changed
    return result._asdict() | changed
