"""A layer of experts with quantised weights: it takes a checkpoint's tensors as published, into a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....ops.linear.shared.repack import Packed, pack_columns, pair_groups
from ....runtime.values import first_line
from ..protocol import ModelError
from .mixture import MixtureOfExperts
from .quantised import Layout, Stored

MXFP4 = "mxfp4"
_FORMATS = {"linear_w4a16": "w4", "linear_w8a16": "w8", "linear_fp8": "fp8", MXFP4: MXFP4}
_GROUP, _NAN = 32, 255  # of mxfp4: columns to a scale, and the exponent that is no number
_STRIP, _BLOCK = 16, 128
_NUMBERS = ("scales", "zeros")


class QuantisedMixture(MixtureOfExperts):
    """Computes what `MixtureOfExperts` does by quantised weights, all in one format. Until it has `take`n all tensors,
    its state dict has none of them; afterwards it has no published ones."""

    def __init__(self, plain: MixtureOfExperts, layout: Layout, where: str) -> None:
        settings = plain.settings
        if layout.op not in _FORMATS or (layout.op == MXFP4) != (not settings.projections):
            raise ModelError(f"{where}: experts in the format of {layout.op} are not implemented here")
        for name, size in {"hidden_size": settings.hidden_size, "columns of an expert": settings.inner_size}.items():
            if size % _STRIP:
                raise ModelError(f"{where}: quantised experts need {name} of a multiple of {_STRIP}, got {size}")
        super().__init__(settings, plain.shared_experts)
        del self.gate_up, self.down
        self.router, self.layout, self.where = plain.router, layout, where
        self.gate_up_bias, self.down_bias = plain.gate_up_bias, plain.down_bias
        self.group_size: int | None = None
        self._taken: dict[str, dict[str, Tensor]] = {}
        for name in ("gate_up", "down"):
            for kind in ("", *(f"_{each}" for each in _NUMBERS)):
                self.register_buffer(name + kind, None)

    def stored(self) -> dict[tuple[str, str], Stored]:
        """Returns the tensors that it takes, by projection and the end of the name."""
        settings = self.settings
        hidden, inner, count = settings.hidden_size, settings.inner_size, settings.num_experts
        if not settings.projections:
            found = {}
            for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
                shape = (count, rows, columns // _GROUP)
                found |= {("", f"{name}_blocks"): Stored(((*shape, _GROUP // 2),), "U8")}
                found |= {("", f"{name}_scales"): Stored((shape,), "U8")}
            return found
        return {
            (projection, kind): stored
            for projection in self.names_of_weights("")
            for kind, stored in self.layout.stored(*self._shape_of(projection)).items()
        }

    def _shape_of(self, projection: str) -> tuple[int, int]:
        hidden, inner = self.settings.hidden_size, self.settings.inner_size
        return (hidden, inner) if projection.endswith(self.settings.projections[2]) else (inner, hidden)

    @property
    def expected_bytes(self) -> int:
        settings = self.settings
        return 3 * settings.num_experts * settings.hidden_size * settings.inner_size * self.layout.bits // 8

    def take(self, projection: str, kind: str, tensor: Tensor, last: bool, dtype: torch.dtype) -> None:
        """Takes a tensor, on the device of the weights; last: it is the projection's last one."""
        taken = self._taken.setdefault(projection, {})
        taken[kind] = tensor
        if not self.settings.projections:
            name = kind.rpartition("_")[0]
            if kind.endswith("_scales") and bool((tensor == _NAN).any()):
                raise ModelError(f"scales in e8m0 must be finite, got {_NAN}, which stands for NaN")
            if {f"{name}_blocks", f"{name}_scales"} <= taken.keys():
                self._take_joined(name.removesuffix("_proj"), taken.pop(f"{name}_blocks"), taken.pop(f"{name}_scales"))
            return
        if not last:
            return
        try:
            packed = self.layout.repack(self._taken.pop(projection), self._shape_of(projection), dtype)
        except ValueError as error:
            raise ModelError(first_line(error).removeprefix("eagle_kernels: ")) from None
        number, _, name = projection.partition(".")
        place = self.settings.projections.index(name)
        self._put(int(number), "down" if place == 2 else "gate_up", place % 2, packed)

    def _take_joined(self, name: str, blocks: Tensor, scales: Tensor) -> None:
        """Takes the weights of all experts in mxfp4: bytes of two columns, the first one in the lower half, and
        exponents of scales."""
        words = [pack_columns(torch.stack((some & 15, some >> 4), -1).flatten(1), 4) for some in blocks.flatten(2)]
        # bf16 has the same exponents; 0 stands for 2^-127, which has a fraction there
        bits = torch.where(scales == 0, 64, scales.to(torch.int32) << 7).to(torch.int16)
        groups = bits.view(torch.bfloat16).flatten(0, 1).T
        paired = pair_groups(groups, groups.shape[0] * _GROUP, _GROUP)
        setattr(self, name, torch.stack(words))
        setattr(self, f"{name}_scales", paired.unflatten(1, (len(words), -1)))

    def _put(self, number: int, name: str, part: int, packed: Packed) -> None:
        """Puts an expert's projection into the table. part: of gate_up, which half."""
        if packed.columns is not None:
            raise ModelError("an order of activations (g_idx) is not implemented for experts")
        rows, is_blocked = _STRIP * len(packed.weight), packed.scales.dim() == 2
        group_size = packed.group_size if self.layout.op != "linear_fp8" else _BLOCK if is_blocked else None
        if is_blocked and group_size == _BLOCK and self.layout.op == "linear_fp8" and rows % _BLOCK:
            raise ModelError(f"experts in blocks of fp8 need rows of a multiple of {_BLOCK}, got {rows}")
        if getattr(self, name) is None and self.gate_up is None and self.down is None:
            self.group_size = group_size
        if group_size != self.group_size:
            raise ModelError(f"experts with groups of {group_size} and of {self.group_size} columns do not mix")
        halves = 2 if name == "gate_up" else 1
        self._slot(name, packed.weight, 0, halves, number, part).copy_(packed.weight)
        self._slot(f"{name}_scales", packed.scales, self._axis(packed.scales), halves, number, part).copy_(
            packed.scales
        )
        if packed.zeros is not None:
            axis = self._axis(packed.zeros)
            self._slot(f"{name}_zeros", packed.zeros, axis, halves, number, part).copy_(packed.zeros)

    def _axis(self, numbers: Tensor) -> int:
        """Returns the axis of outputs of scales or zero points."""
        return 0 if numbers.dim() == 1 else 1

    def _slot(self, name: str, tensor: Tensor, axis: int, halves: int, number: int, part: int) -> Tensor:
        """Returns the place of an expert's tensor in a table, which has the experts before that axis."""
        shape, count = list(tensor.shape), self.settings.num_experts
        if getattr(self, name) is None:
            whole = [*shape[:axis], count, halves * shape[axis], *shape[axis + 1 :]]
            usual = 8 * (self.layout.op == "linear_w4a16") if name.endswith("_zeros") else 0
            setattr(self, name, torch.full(whole, usual, dtype=tensor.dtype, device=tensor.device))
        one = getattr(self, name).select(axis, number)
        return one.narrow(axis, part * shape[axis], shape[axis])

    def table(self) -> dict[str, Any]:
        names = ("gate_up", "down", "gate_up_scales", "down_scales", "gate_up_zeros", "down_zeros")
        options = {"weight_format": _FORMATS[self.layout.op], "group_size": self.group_size}
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return {name: getattr(self, name) for name in names} | biases | options

    def pack(self) -> None:
        """Leaves the shared experts where they are, whose weights may have another format."""

    def published(self) -> dict[str, Tensor]:
        if self.settings.projections:
            return {}
        return {"experts.gate_up_proj_bias": self.gate_up_bias, "experts.down_proj_bias": self.down_bias}


def is_plain_mixture(module: nn.Module) -> bool:
    """Returns whether a module has weights of experts that may be quantised."""
    return type(module) is MixtureOfExperts
