"""The linear of quantised weights: it takes a checkpoint's tensors in their published layout, and repacks them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .... import ops
from ....ops.linear.shared.repack import Packed, joined
from ....runtime.values import first_line
from ..protocol import ModelError
from .linear import Linear

PLAIN = "linear_decode"  # of weights that stay in 16 bit


class Stored(NamedTuple):
    """Describes a tensor that a file holds of a linear's weight."""

    shapes: tuple[tuple[int, ...], ...]  # each of these is taken
    dtypes: str  # words of safetensors, with spaces between them
    is_optional: bool = False


class Layout(NamedTuple):
    """Tells how a weight is stored, and how it becomes the layout of the ops."""

    op: str  # the operator that multiplies by it
    stored: Callable[[int, int], dict[str, Stored]]  # (outputs, inputs) -> the tensors, by the ends of their names
    repack: Callable[[dict[str, Tensor], tuple[int, int], torch.dtype], Packed]
    bits: int = 16  # of a weight, to estimate memory
    ordered_by: str = ""  # the setting by which groups have scattered columns, as errors show it; "": neighbours


class Weights(nn.Module):
    """Multiplies by what one op reads: weights of one or several projections, side by side."""

    def __init__(self, op: str, packed: Packed, num_outputs: int) -> None:
        super().__init__()
        self.op, self.group_size, self.num_outputs = op, packed.group_size, num_outputs
        for name in ("weight", "scales", "zeros", "columns"):
            self.register_buffer(name, getattr(packed, name))

    def forward(self, x: Tensor, bias: Tensor | None, deterministic: bool) -> Tensor:
        tensors: list[Any] = [self.weight, self.scales]
        options: dict[str, Any] = {"bias": bias}
        if self.op != "linear_fp8":
            tensors += [self.zeros, self.columns]
            options["group_size"] = self.group_size
        op = getattr(ops, self.op)
        if x.dtype == torch.float32:  # on a CPU: loading refuses it for GPUs
            return op.reference(x, *tensors, **options)
        # prefetch_weight: no kernel of a step writes weights
        return op(x, *tensors, **options, prefetch_weight=True, deterministic=deterministic)


class QuantisedLinear(Linear):
    """Multiplies as `Linear` does, by weights that are `take`n one tensor after the other.

    layouts: that of each projection, "" standing for the only one. Projections of one layout are multiplied at once
    where their scales and orders of columns allow it. Until it has all tensors, the state dict has none of them;
    afterwards it has those of the ops.
    """

    def __init__(
        self, input_size: int, outputs: int | dict[str, int], bias: bool, layouts: dict[str, Layout]
    ) -> None:  # fmt: skip
        super().__init__(input_size, outputs, bias=bias)
        del self.weight
        self.layouts = layouts
        self.sizes = self.projections or {"": self.out_features}
        self._taken: dict[str, dict[str, Tensor]] = {projection: {} for projection in self.sizes}
        self._packed: dict[str, Packed | Tensor] = {}
        self.parts = nn.ModuleList()

    def stored(self) -> dict[tuple[str, str], Stored]:
        """Returns the tensors that it takes, by projection and the end of the name."""
        return {
            (projection, kind): stored
            for projection, layout in self.layouts.items()
            for kind, stored in layout.stored(self.sizes[projection], self.in_features).items()
        }

    @property
    def expected_bytes(self) -> int:
        return sum(size * self.in_features * self.layouts[name].bits // 8 for name, size in self.sizes.items())

    def take(self, projection: str, kind: str, tensor: Tensor, last: bool, dtype: torch.dtype) -> None:
        """Takes a tensor, on the device of the weights; last: it is the projection's last one."""
        self._taken[projection][kind] = tensor
        if not last:
            return
        layout, shape = self.layouts[projection], (self.sizes[projection], self.in_features)
        try:
            self._packed[projection] = layout.repack(self._taken.pop(projection), shape, dtype)
        except ValueError as error:
            raise ModelError(first_line(error).removeprefix("eagle_kernels: ")) from None
        if not self._taken:
            self._join()

    def _join(self) -> None:
        """Makes the parts, of neighbouring projections that one op can read together."""
        names = list(self.sizes)
        while names:
            op, together = self.layouts[names[0]].op, [names.pop(0)]
            while names and op != PLAIN and self.layouts[names[0]].op == op:
                together.append(names.pop(0))
            self.parts.extend(self._parts_of(op, together))
        self._packed = {}

    def _parts_of(self, op: str, names: list[str]) -> list[nn.Module]:
        if op == PLAIN:
            plain = Linear(self.in_features, self.sizes[names[0]], bias=False)
            plain.weight = nn.Parameter(self._packed[names[0]].weight, requires_grad=False)
            return [plain]
        packed, sizes = [self._packed.pop(name) for name in names], [self.sizes[name] for name in names]
        if len(names) > 1:
            with suppress(ValueError):  # other orders of columns, for one: then each is multiplied by itself
                packed, sizes = [joined(packed, sizes)], [sum(sizes)]
        return [Weights(op, each, size) for each, size in zip(packed, sizes, strict=True)]

    def forward(self, x: Tensor, deterministic: bool = False, in_parts: bool = False, skipped: int = 0) -> Tensor:
        """See `Linear.forward`; the result has no parts."""
        rows, results, first = x.flatten(0, 1), [], 0
        for part in self.parts:
            size = part.out_features if isinstance(part, Linear) else part.num_outputs
            if first + size > skipped:
                bias = None if self.bias is None else self.bias[first : first + size]
                result = self._multiply(part, rows, bias, deterministic)
                results.append(result[:, max(skipped - first, 0) :])
            first += size
        return (results[0] if len(results) == 1 else torch.cat(results, dim=-1)).unflatten(0, x.shape[:2])

    def _multiply(self, part: nn.Module, rows: Tensor, bias: Tensor | None, deterministic: bool) -> Tensor:
        if isinstance(part, Linear):
            result = part(rows[None], deterministic)[0]
            return result if bias is None else result + bias
        return part(rows, bias, deterministic)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        if self.bias is not None:
            bias, around = self.bias if keep_vars else self.bias.detach(), prefix.split(".")[:-2]
            names = [".".join((*around, each, "bias")) for each in self.projections] or [f"{prefix}bias"]
            destination |= zip(names, bias.split([*self.sizes.values()]), strict=True)
