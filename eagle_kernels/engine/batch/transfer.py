"""Copies between the host and the device, for which neither waits. They go through pinned memory, which is not
allocated anew each time: PyTorch's caching host allocator notes the stream of a copy, and reuses a freed block once the
stream has passed it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Queues a copy to the host and returns it; on the CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Queues a copy of numbers to the device and returns it."""
    # by name, since another device may be the default
    host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
