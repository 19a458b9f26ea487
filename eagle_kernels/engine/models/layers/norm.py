"""The RMS norm, and the choice between the library's operators and their forms for training."""

from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from .... import ops

_DIFFERENTIABLE = SimpleNamespace(rms_norm=ops.rms_norm.reference, silu_and_mul=ops.silu_and_mul.reference)


def library(*tensors: Tensor) -> ModuleType | SimpleNamespace:
    """Returns the operators to apply to these tensors: `ops`, or in training their plain PyTorch forms, which have
    derivatives and run in mixed precision."""
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _DIFFERENTIABLE if is_trained or torch.is_autocast_enabled(tensors[0].device.type) else ops


class RMSNorm(nn.Module):
    """Norms x [B, T, H] or [B, T, heads, H]: x / rms(x) in fp32, rounded to the dtype of x, then scaled."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = library(x, self.weight).rms_norm
        return norm(x.flatten(0, 1), self.weight, eps=self.eps).output.unflatten(0, x.shape[:2])

    def add(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns stream + delta [B, T, H] and its norm, from one kernel; delta None stands for zeros. delta may be in
        parts, see `Linear`."""
        if delta is None:
            return stream, self(stream)
        norm, shape = library(stream, delta, self.weight).rms_norm, stream.shape
        options = {"eps": self.eps, "sums_parts": delta.dim() > stream.dim()}
        normed, stream = norm(delta.flatten(-3, -2), self.weight, stream.flatten(0, 1), **options)
        return stream.view(shape), normed.view(shape)
