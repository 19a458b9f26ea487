"""Moving a case to the device as it is: `Tensor.to` closes the gaps of a strided view, which some cases are about."""

import torch


def to_device(values: dict, device) -> dict:
    """The same arguments with every tensor on `device`, strides kept."""
    return {key: _move(value, device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _move(value: torch.Tensor, device) -> torch.Tensor:
    if 0 in value.stride() and value.numel():  # one number in many places
        value = value.contiguous()
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)
