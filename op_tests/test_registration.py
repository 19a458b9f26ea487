"""torch.library: schemas, fake implementations and both overloads of every op, in each of its modes."""

from __future__ import annotations

import pytest
import torch

import eagle_kernels

from .harness import to_device
from .harness.ahead_of_time import PATHS
from .harness.cases import as_tuple, case_of_each_mode, num_elements, tensors_of

# opcheck's other test compiles, which `test_public.py` and `test_hostile_calls.py` do
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
MOST_ELEMENTS = 400_000
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def cases(path: str) -> list[dict]:
    """Without NaN, which opcheck takes for a change, and floats of 8 bits, which it cannot multiply."""
    return [
        values | {name: tensor.nan_to_num() for name, tensor in tensors_of(values).items() if tensor.dtype in FLOATS}
        for values in case_of_each_mode(path)
        if num_elements(values) < MOST_ELEMENTS
        and not any("float8" in str(tensor.dtype) for tensor in tensors_of(values).values())
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_registration(path, device):
    name = path.rpartition(".")[2]
    packet = getattr(torch.ops.eagle_kernels, name)
    for values in cases(path):
        values = to_device(values, device)
        torch.library.opcheck(packet.default, (), values, test_utils=CHECKS)
        if "out" not in packet.overloads():
            continue
        result = getattr(eagle_kernels, name)(**values)
        buffers = [torch.empty_like(tensor) for tensor in as_tuple(result)]
        names = [argument.name for argument in packet.out._schema.arguments if argument.name.startswith("out_")]
        torch.library.opcheck(packet.out, (), {**values, **dict(zip(names, buffers))}, test_utils=CHECKS)
        out = buffers[0] if isinstance(result, torch.Tensor) else type(result)(*buffers)
        getattr(eagle_kernels, name)(**values, out=out)
        for want, got in zip(as_tuple(result), buffers):
            assert torch.equal(want, got) or (want.is_floating_point() and torch.allclose(want, got, equal_nan=True))
