"""Quantising at loading: weights in 16 bit become what the ops with quantised weights read, a weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops.linear.shared.repack import Packed, from_fp8, from_int8, pack_columns, pair_groups
from ...runtime.values import shown
from .layers.quantised import Layout, Stored
from .quantised_layouts import LAYOUTS
from .quantised_linears import Quantisation

_FLOATS = "F16 BF16 F32"
_GROUP, _BLOCK = 128, 128
_ROWS_AT_ONCE = 512  # a multiple of a block; copies in fp32 are of these
_LARGEST_FP8 = 448.0
# What can be chosen apart: the linears of a decoder's layers or of a head, those of experts, and the output.
PARTS = ("dense", "experts", "lm_head")


def _wint4(weight: Tensor) -> Packed:
    """Rounds groups of 128 columns to -7..7 times a scale of 16 bits."""
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    groups = -(-weight.shape[1] // _GROUP)
    dtype = torch.float16 if weight.dtype == torch.float32 else weight.dtype
    scales = torch.empty((groups, len(weight)), dtype=dtype, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        some = weight[first : first + _ROWS_AT_ONCE].float()
        padded = torch.nn.functional.pad(some, (0, -some.shape[1] % _GROUP)).unflatten(1, (groups, _GROUP))
        scale = _scale_of(padded.abs().amax(-1), 7.0).to(dtype)
        rounded = (padded / scale.float()[..., None]).round().clamp(-7, 7).flatten(1)[:, : some.shape[1]]
        values[first : first + len(some)] = (rounded + 8).to(torch.uint8)
        scales[:, first : first + len(some)] = scale.T
    if groups == 1:
        return Packed(pack_columns(values, 4), scales[0].contiguous())
    return Packed(pack_columns(values, 4), pair_groups(scales, weight.shape[1], _GROUP), None, None, _GROUP)


def _wint8(weight: Tensor) -> Packed:
    """Rounds rows to -127..127 times a scale."""
    return from_int8(*_by_rows(weight, torch.int8, 127.0))


def _fp8(weight: Tensor) -> Packed:
    """Rounds rows to float8_e4m3fn times a scale."""
    return from_fp8(*_by_rows(weight, torch.float8_e4m3fn, _LARGEST_FP8))


def _block_wise_fp8(weight: Tensor) -> Packed:
    """Rounds blocks of 128 x 128 to float8_e4m3fn times a scale."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    scales = torch.empty((rows, columns), dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        some = weight[first : first + _ROWS_AT_ONCE].float()
        padded = torch.nn.functional.pad(some, (0, -some.shape[1] % _BLOCK, 0, -len(some) % _BLOCK))
        blocks = padded.unflatten(1, (columns, _BLOCK)).unflatten(0, (-1, _BLOCK))
        scale = _scale_of(blocks.abs().amax((1, 3)), _LARGEST_FP8)
        rounded = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: len(some), : some.shape[1]]
        values[first : first + len(some)] = rounded.to(torch.float8_e4m3fn)
        scales[first // _BLOCK :][: len(scale)] = scale
    return from_fp8(values, scales)


def _by_rows(weight: Tensor, dtype: torch.dtype, most: float) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        some = weight[first : first + _ROWS_AT_ONCE].float()
        scale = _scale_of(some.abs().amax(1, keepdim=True), most)
        rounded = some / scale
        values[first : first + len(some)] = (rounded.round() if dtype == torch.int8 else rounded).to(dtype)
        scales[first : first + len(some)] = scale
    return values, scales


def _scale_of(largest: Tensor, most: float) -> Tensor:
    """Returns largest / most, and 1 for zeros."""
    if not bool(largest.isfinite().all()):
        raise ValueError("weights that are quantised must be finite, got infinity or NaN")
    return torch.where(largest > 0, largest / most, 1.0)


_METHODS: dict[str, tuple[str, int, Callable[[Tensor], Packed]]] = {
    "wint4": ("linear_w4a16", 4, _wint4),
    "wint8": ("linear_w8a16", 8, _wint8),
    "block_wise_fp8": ("linear_fp8", 8, _block_wise_fp8),
    "fp8": ("linear_fp8", 8, _fp8),
}
_SYNONYMS = {"w4a16": "wint4", "w8a16": "wint8"}  # vLLM's and SGLang's words
METHODS = (*_METHODS, *_SYNONYMS)


def read_quantize(argument: str, value: Any) -> dict[str, str] | None:
    """Returns how each part is quantised, by `PARTS`. A name alone is for dense layers and experts."""
    if value is None:
        return None
    parts = {"dense": value, "experts": value} if isinstance(value, str) else value
    if isinstance(parts, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in parts):
        parts = {str(part): name for part, name in parts}
    is_table = isinstance(parts, Mapping) and len(parts) > 0 and all(part in PARTS for part in parts)
    if not (is_table and all(isinstance(name, str) and name.lower() in METHODS for name in parts.values())):
        rule = f"be None, one of {', '.join(METHODS)}, or a dict of these under {', '.join(PARTS)}"
        raise ValueError(f"{argument} must {rule}, got {shown(value)}")
    return {part: _SYNONYMS.get(name.lower(), name.lower()) for part, name in parts.items()}


def quantise_at_load(
    stored: Quantisation | None, chosen: Mapping[str, str] | None, leaves_others: bool = False
) -> Quantisation | None:  # fmt: skip
    """Returns how a folder's weights are quantised if those that it has in 16 bit are, as `read_quantize` tells it.
    stored: how its others are. leaves_others: whether these may be named, too, as by a name alone, and stay."""
    if chosen is None:
        return stored
    layouts = {part: _layout_of(*_METHODS[name]) for part, name in chosen.items()}

    def layout_of(name: str) -> Layout | None:
        last = name.rpartition(".")[2]
        if last in ("gate", "router"):  # chooses experts
            return None
        return layouts.get("lm_head" if last == "lm_head" else "experts" if ".experts" in name else "dense")

    stored = stored or Quantisation("", lambda name: None, LAYOUTS["16 bit"]())
    return stored._replace(at_load=layout_of, leaves_others=leaves_others)


def _layout_of(op: str, bits: int, quantise: Callable[[Tensor], Packed]) -> Layout:
    def repack(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        return quantise(tensors["weight"].to(dtype))

    return Layout(op, lambda n, k: {"weight": Stored(((n, k),), _FLOATS)}, repack, bits)
