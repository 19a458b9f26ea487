"""The linear of weights that are not quantised."""

import torch
from torch import Tensor, nn

from .... import ops
from ....ops.linear.linear_decode import is_for, max_rows, parts_for
from .norm import library


class Linear(nn.Linear):
    """Multiplies x [B, T, K] by weightᵀ and adds the bias; on a GPU, `ops.linear_decode` does it for a few tokens.

    outputs: N or, where one product computes several projections of one input, their published names and sizes. The
    state dict then holds views of each one's rows, as separate modules would; `join_projections` is the way back.
    """

    def __init__(self, input_size: int, outputs: int | dict[str, int], bias: bool = True) -> None:
        projections = outputs if isinstance(outputs, dict) else {}
        super().__init__(input_size, sum(projections.values()) if projections else outputs, bias=bias)
        self.projections = projections

    def forward(self, x: Tensor, deterministic: bool = False, in_parts: bool = False, skipped: int = 0) -> Tensor:
        """deterministic: a row's bits do not depend on the other rows, nor on their number. For GPUs alone.
        in_parts: where that is faster, returns parts [P, B, T, N] fp32 for `RMSNorm.add`. skipped: how many outputs are
        left out, from the first on."""
        weight, bias, num_rows = self.weight, self.bias, x.shape[:2].numel()
        if skipped:
            weight, bias = weight[skipped:], None if bias is None else bias[skipped:]
        parts = parts_for(num_rows, weight, deterministic) if in_parts and x.is_cuda else None
        is_decoding = parts is not None or deterministic or x.is_cuda and is_for(num_rows, weight)
        if is_decoding and library(x, weight, *(() if bias is None else (bias,))) is ops:
            # prefetch_weight: no kernel of a step writes weights
            options = {"num_parts": parts, "prefetch_weight": True, "deterministic": deterministic}
            rows = x.flatten(0, 1).split(max_rows(x.dtype))
            results = [ops.linear_decode(some, weight, bias, **options) for some in rows]
            return (results[0] if len(results) == 1 else torch.cat(results, dim=-2)).unflatten(-2, x.shape[:2])
        if deterministic:
            raise RuntimeError("EAGLEInference: deterministic must be False in training and under torch.autocast")
        return nn.functional.linear(x, weight, bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        if not self.projections:
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        for kind, names in self.stored_names(prefix).items():
            tensor = getattr(self, kind) if keep_vars else getattr(self, kind).detach()
            destination |= zip(names, tensor.split([*self.projections.values()]), strict=True)

    def stored_names(self, prefix: str) -> dict[str, list[str]]:
        """Returns the names in a state dict of each tensor's projections; prefix: begins the tensors' own names."""
        around, tensors = prefix.split(".")[:-2], (*self.named_parameters(), *self.named_buffers())
        return {kind: [".".join((*around, each, kind)) for each in self.projections] for kind, _ in tensors}


def join_projections(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Joins what each `Linear` of a model computes as one product; a hook that runs before `load_state_dict`."""
    for path, linear in model.named_modules():
        for kind, names in linear.stored_names(f"{prefix}{path}.").items() if isinstance(linear, Linear) else ():
            if names and all(name in state_dict for name in names):
                state_dict[f"{prefix}{path}.{kind}"] = torch.cat([state_dict.pop(name) for name in names])
