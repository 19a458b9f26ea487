"""torch.library: schema, fake implementation and both overloads of a public op."""

import torch

import eagle_kernels

from .cases import as_tuple

# opcheck's other test compiles, which `test_public.py` and `test_hostile_calls.py` do
_CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def check_registration(name: str, values: dict) -> None:
    """opcheck on `eagle_kernels::<name>` and its `.out` form, and equal results of both."""
    packet = getattr(torch.ops.eagle_kernels, name)
    torch.library.opcheck(packet.default, (), values, test_utils=_CHECKS)
    if "out" not in packet.overloads():
        return
    result = getattr(eagle_kernels, name)(**values)
    buffers = [torch.empty_like(tensor) for tensor in as_tuple(result)]
    names = [a.name for a in packet.out._schema.arguments if a.name.startswith("out_")]
    torch.library.opcheck(packet.out, (), {**values, **dict(zip(names, buffers))}, test_utils=_CHECKS)
    out = buffers[0] if isinstance(result, torch.Tensor) else type(result)(*buffers)
    getattr(eagle_kernels, name)(**values, out=out)
    for want, got in zip(as_tuple(result), buffers):
        assert torch.equal(want, got) or (want.is_floating_point() and torch.allclose(want, got, equal_nan=True))
