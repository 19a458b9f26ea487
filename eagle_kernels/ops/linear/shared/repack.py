"""Repacking of quantised weights, once at loading, from the layouts of checkpoints into that of the ops.

It happens on the device of the tensors, a few strips of 16 outputs at a time, so that extra memory does not grow with
the layer. A layer needs of the layout (reference/ops/linear/shared/packing.py): words w and w + 1 of an output, for an
even w, in a block of 128 columns hold columns w, W + w, 2 * W + w, ... in their lower halves and w + 1, W + w + 1, ...
in their upper ones, W = 128 * bits / 32. So a program streams 16 bytes a thread from one place in memory, and unpacks
them without moving anything between threads (`unpacking.py`).

The layouts that are read, and where they are defined:

    AWQ                 qweight [K, N / 8]: place i of a word is output 8 * c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; qzeros
                        [G, N / 8] likewise, scales [G, N] (AutoAWQ, awq/utils/packing_utils.py, AWQ_ORDER)
    GPTQ                qweight [K / 8, N]: place i of word r is column 8 * r + i; qzeros [G, N / 8], in version 1 less
                        one; scales [G, N]; g_idx [K], the group of each column (GPTQModel, nn_modules/qlinear and
                        utils/model.py, convert_gptq_v1_to_v2_format). With 8 bits 4 in place of 8.
    compressed-tensors  weight_packed [N, K / 8]: place i of word c is column 8 * c + i, plus 8; weight_zero_point
                        [N / 8, G], packed along outputs; weight_scale [N, G]; weight_g_idx [K]
                        (compressors/quantized_compressors/pack_quantized.py, pack_to_int32)
    int8                weight [N, K], weight_scale [N], [N, 1] or [N, G]
                        (compressed-tensors, int-quantized)
    fp8                 weight [N, K] float8_e4m3fn; weight_scale [], [1], [N] or [N, 1] (compressed-tensors
                        float-quantized, ModelOpt, whose names they are too), or weight_scale_inv
                        [N / 128, K / 128], which is to be multiplied as well (DeepSeek-V3, inference/fp8_cast_bf16.py);
                        ModelOpt writes the latter as [N / 128, 1, K / 128, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ....runtime.values import shown

_BLOCK_COLUMNS, _BLOCK_OUTPUTS = 128, 16
# outputs that are repacked at once
_OUTPUTS_AT_ONCE = 512
# the place in a word of AWQ's that holds each of eight outputs
_PLACES_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


class Packed(NamedTuple):
    """A layer's weights as `linear_w4a16`, `linear_w8a16` or `linear_fp8` takes them."""

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    group_size: int | None = None  # None: whole rows, or fp8


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Packed:
    """Returns the weights of AWQ's layout, for `linear_w4a16`."""
    _check(qweight, "qweight", (None, None), torch.int32)
    num_columns, num_outputs = qweight.shape[0], 8 * qweight.shape[1]
    num_groups = _check_scales(scales, num_outputs, num_columns)
    _check(qzeros, "qzeros", (num_groups, qweight.shape[1]), torch.int32)
    places = torch.tensor(_PLACES_OF_AWQ, dtype=torch.int64, device=qweight.device)

    def values(first: int, stop: int) -> torch.Tensor:
        return _unpacked(qweight[:, first // 8 : -(-stop // 8)], 4)[..., places].flatten(1).T

    weight = _packed(values, num_outputs, num_columns, 4, qweight.device)
    return _layer(weight, scales, _zeros(_unpacked(qzeros, 4)[..., places].flatten(1), 4), None, num_columns)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bits: int = 4,
    is_v2: bool = False,
) -> Packed:
    """Returns the weights of GPTQ's layout, for `linear_w4a16` or `linear_w8a16`.
    is_v2: zeros are stored as they are; in version 1 they are stored less one."""
    _check_bits(bits)
    _check(qweight, "qweight", (None, None), torch.int32)
    num_columns, num_outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    num_groups = _check_scales(scales, num_outputs, num_columns)
    _check(qzeros, "qzeros", (num_groups, num_outputs * bits // 32), torch.int32)
    columns = _order_of(g_idx, num_groups, num_columns)

    def values(first: int, stop: int) -> torch.Tensor:
        some = _signed(_unpacked(qweight[:, first:stop], bits), bits).permute(1, 0, 2).flatten(1)
        return some if columns is None else some[:, columns]

    weight = _packed(values, num_outputs, num_columns, bits, qweight.device)
    zeros = (_unpacked(qzeros, bits).flatten(1) + int(not is_v2)) & ((1 << bits) - 1)
    return _layer(weight, scales, _zeros(zeros, bits), columns, num_columns)


def from_compressed(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    shape: Sequence[int],
    bits: int = 4,
) -> Packed:
    """Returns the weights of compressed-tensors' pack-quantized layout, for `linear_w4a16` or `linear_w8a16`.
    shape: (N, K), which checkpoints hold as weight_shape."""
    _check_bits(bits)
    (num_outputs, num_columns), per_word = map(int, shape), 32 // bits
    _check(weight_packed, "weight_packed", (num_outputs, -(-num_columns // per_word)), torch.int32)
    scales = weight_scale.reshape(num_outputs, -1).T
    num_groups = _check_scales(scales, num_outputs, num_columns, "weight_scale")
    columns = _order_of(weight_g_idx, num_groups, num_columns)

    def values(first: int, stop: int) -> torch.Tensor:
        some = _signed(_unpacked(weight_packed[first:stop], bits), bits).flatten(1)[:, :num_columns]
        return some if columns is None else some[:, columns]

    weight = _packed(values, num_outputs, num_columns, bits, weight_packed.device)
    zeros = None
    if weight_zero_point is not None:
        rows = -(-num_outputs // per_word)
        _check(weight_zero_point, "weight_zero_point", (rows, num_groups), torch.int32)
        zeros = _zeros(_unpacked(weight_zero_point.T, bits).flatten(1)[:, :num_outputs], bits)
    return _layer(weight, scales, zeros, columns, num_columns)


def from_int8(weight: torch.Tensor, weight_scale: torch.Tensor) -> Packed:
    """Returns the weights of an int8 tensor [N, K], for `linear_w8a16`."""
    _check(weight, "weight", (None, None), torch.int8)
    scales = (
        weight_scale.reshape(len(weight), -1).T if weight_scale.numel() > 1 else weight_scale.expand(1, len(weight))
    )
    _check_scales(scales, *weight.shape, "weight_scale")
    return _layer(pack_columns(weight, 8), scales, None, None, weight.shape[1])


def from_fp8(weight: torch.Tensor, weight_scale: torch.Tensor) -> Packed:
    """Returns the weights of a tensor float8_e4m3fn [N, K], for `linear_fp8`."""
    _check(weight, "weight", (None, None), torch.float8_e4m3fn)
    num_outputs, num_columns = weight.shape
    if weight_scale.dim() == 4:  # ModelOpt's blocks
        weight_scale = weight_scale.flatten(2).flatten(0, 1)
    size = tuple(weight_scale.shape)
    if not bool(weight_scale.isfinite().all()):
        _fail("weight_scale", "be finite", "infinity or NaN")
    scale = weight_scale.float()
    if size in ((), (1,), (1, 1), (num_outputs,), (num_outputs, 1)):
        scales = scale.flatten().expand(num_outputs).contiguous()
    elif size == (-(-num_outputs // 128), -(-num_columns // 128)):
        if num_outputs % _BLOCK_OUTPUTS:
            _fail("weight", "have N of a multiple of 16 for scales of blocks", num_outputs)
        scales = scale.T.contiguous()
    else:
        _fail("weight_scale", "be one number, [N], [N, 1] or [N / 128, K / 128]", list(size))
    for first in range(0, num_outputs, _OUTPUTS_AT_ONCE):
        if bool(((weight[first : first + _OUTPUTS_AT_ONCE].view(torch.uint8) & 127) == 127).any()):
            _fail("weight", "hold numbers", f"NaN in rows from {first} on")
    return Packed(pack_columns(weight.view(torch.uint8), 8), scales)


def joined(layers: Sequence[Packed], num_outputs: Sequence[int]) -> Packed:
    """Returns one layer that makes the outputs of several, as of q, k and v, side by side. num_outputs: of each one."""
    first = layers[0]
    for number in num_outputs[:-1]:
        if number % (128 if first.group_size is None and first.scales.dim() == 2 else _BLOCK_OUTPUTS):
            _fail("layers that are joined", "have N of a multiple of 16, of blocks 128, but for the last one", number)
    for layer in layers[1:]:
        if (layer.weight.shape[1:], layer.group_size) != (first.weight.shape[1:], first.group_size):
            _fail("layers that are joined", "have the same K and groups", layer.group_size)
        if layer.scales.dim() != first.scales.dim():  # of one block, whose scale is that of all rows
            _fail("layers that are joined", "all have scales of blocks, or none", list(layer.scales.shape))
        same = (layer.columns is None) == (first.columns is None)
        if not same or first.columns is not None and not torch.equal(layer.columns, first.columns):
            _fail("layers that are joined", "have the same order of columns", "another one")
    axis = 0 if first.scales.dim() == 1 else 1
    zeros = None
    if any(layer.zeros is not None for layer in layers):
        zeros = torch.cat([_given_zeros(layer) for layer in layers], dim=axis)
    weight, scales = (torch.cat([layer[field] for layer in layers], dim=field * axis) for field in (0, 1))
    return Packed(weight, scales, zeros, first.columns, first.group_size)


def pair_groups(numbers: torch.Tensor, num_columns: int, group_size: int) -> torch.Tensor:
    """Returns scales or zero points [G, N] as the ops take them: [ceil(G / 2), N, 2] of 16 bits."""
    together = 2
    groups = -(-num_columns // _BLOCK_COLUMNS) * _BLOCK_COLUMNS // group_size
    groups = -(-groups // together) * together
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, groups - len(numbers)))
    return padded.unflatten(0, (-1, together)).transpose(1, 2).contiguous()


def pack_columns(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the words of values [N, K] of 4 or 8 bits, int8 or uint8."""
    _check_bits(bits)
    return _packed(lambda first, stop: values[first:stop], *values.shape, bits, values.device)


def _packed(
    values: Callable[[int, int], torch.Tensor], num_outputs: int, num_columns: int, bits: int, device: torch.device
) -> torch.Tensor:
    """Returns the words of values(first, stop), those of some outputs [stop - first, K]."""
    strips, blocks = -(-num_outputs // _BLOCK_OUTPUTS), -(-num_columns // _BLOCK_COLUMNS)
    per_word, num_words = 32 // bits, _BLOCK_COLUMNS * bits // 32
    words = torch.empty((strips, blocks, _BLOCK_OUTPUTS, num_words), dtype=torch.int32, device=device)
    for first in range(0, num_outputs, _OUTPUTS_AT_ONCE):
        some = values(first, min(first + _OUTPUTS_AT_ONCE, num_outputs))
        pad = (0, -num_columns % _BLOCK_COLUMNS, 0, -len(some) % _BLOCK_OUTPUTS)
        some = torch.nn.functional.pad(some.to(torch.uint8) & ((1 << bits) - 1), pad)
        some = some.view(-1, _BLOCK_OUTPUTS, blocks, per_word, num_words).transpose(1, 2)
        made = torch.zeros_like(words[first // _BLOCK_OUTPUTS :][: len(some)])
        for place in range(per_word):
            made |= some[:, :, :, place].to(torch.int32) << (bits * place)
        halves = made.view(torch.int16).unflatten(-1, (-1, 2, 2)).transpose(-1, -2)
        words[first // _BLOCK_OUTPUTS :][: len(some)] = halves.flatten(-3).view(torch.int32)
    return words


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the values of words [.., 32 / bits], int32, from the lowest place on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts) & ((1 << bits) - 1)


def _signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns values as the ops take them: those of 8 bits, which stand 128 higher in words, in two's complement."""
    return values ^ 128 if bits == 8 else values


def _zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Returns zero points [G, N] as the ops take them: None where all stand in the middle."""
    middle = 1 << (bits - 1)
    if bool((zeros == middle).all()):
        return None
    return zeros.to(torch.uint8) if bits == 4 else (zeros - middle).to(torch.int8)


def _order_of(g_idx: torch.Tensor | None, num_groups: int, num_columns: int) -> torch.Tensor | None:
    """Returns the columns sorted by their group, None where they are."""
    if g_idx is None or bool((g_idx < 0).any()):  # which compressed-tensors writes for none
        return None
    _check(g_idx, "g_idx", (num_columns,), torch.int32, torch.int64)
    size = _group_of(num_groups, num_columns)
    usual = torch.arange(num_columns, device=g_idx.device) // size
    if torch.equal(g_idx.long(), usual):
        return None
    columns = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[columns].long(), usual):
        _fail("g_idx", f"give each of {num_groups} groups {size} columns", "another number")
    return columns.to(torch.int32)


def _layer(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, columns: torch.Tensor | None,
    num_columns: int,
) -> Packed:  # fmt: skip
    """Returns a layer of scales and zero points [G, N]."""
    if len(scales) == 1:
        return Packed(weight, scales[0].contiguous(), None if zeros is None else zeros[0].contiguous(), columns)
    size = _group_of(len(scales), num_columns)
    if scales.dtype == torch.float32:
        _fail("scales", "have dtype float16 or bfloat16 for groups", scales.dtype)
    zeros = None if zeros is None else pair_groups(zeros.to(torch.int16), num_columns, size)
    return Packed(weight, pair_groups(scales, num_columns, size), zeros, columns, size)


def _group_of(num_groups: int, num_columns: int) -> int | None:
    """Returns the columns of a group, K for whole rows; None where no groups that are known come to this number."""
    if num_groups == 1:
        return num_columns
    return next((size for size in (32, 64, 128) if -(-num_columns // size) == num_groups), None)


def _given_zeros(layer: Packed) -> torch.Tensor:
    """Returns a layer's zero points, those in the middle where it has none."""
    if layer.zeros is not None:
        return layer.zeros
    is_narrow, shape = layer.weight.shape[-1] == 16, list(layer.scales.shape)
    if layer.group_size is not None:
        groups = layer.weight.shape[1] * _BLOCK_COLUMNS // layer.group_size
        shape = [-(-groups // 2), shape[1], 2]
    dtype = torch.int16 if layer.group_size is not None else torch.uint8 if is_narrow else torch.int8
    return torch.full(shape, 8 * is_narrow, dtype=dtype, device=layer.weight.device)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        _fail("bits", "be 4 or 8", bits)


def _check(tensor: torch.Tensor, name: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        _fail(name, "have dtype " + " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes), tensor.dtype)
    if tensor.dim() != len(shape) or any(size not in (None, own) for size, own in zip(shape, tensor.shape)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        _fail(name, f"have shape [{wanted}]", list(tensor.shape))


def _check_scales(scales: torch.Tensor, num_outputs: int, num_columns: int, name: str = "scales") -> int:
    """Checks scales [G, N]. Returns G."""
    _check(scales, name, (None, num_outputs), torch.float16, torch.bfloat16, torch.float32)
    if _group_of(len(scales), num_columns) is None:
        _fail(
            name, f"be for groups of 32, 64 or 128 of {num_columns} columns, or for whole rows", f"{len(scales)} groups"
        )
    if not bool(scales.isfinite().all()):
        _fail(name, "be finite", "infinity or NaN")
    return len(scales)


def _fail(name: str, rule: str, got) -> NoReturn:
    raise ValueError(f"eagle_kernels: {name} of quantised weights must {rule}, got {shown(got, str, 100)}")
