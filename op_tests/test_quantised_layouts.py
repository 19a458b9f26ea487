"""Repacking of quantised weights: each layout of checkpoints, written by hand here from its definition, read back.

What is written goes place by place, in Python, so that it shares no step with the repacking.
"""

import itertools

import pytest
import torch

from eagle_kernels.ops.linear.shared import repack
from eagle_kernels.reference.ops.linear import linear_w4a16, linear_w8a16
from eagle_kernels.reference.ops.linear.linear_fp8 import linear_fp8
from eagle_kernels.reference.ops.linear.shared import packing

SIZES = ((16, 32, 32), (24, 200, 64), (520, 256, 128), (40, 96, None))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def words_of(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Packs each row's values into words of 32 bits, the first one in the lowest place."""
    per_word, packed = 32 // bits, []
    for row in rows:
        row = row + [0] * (-len(row) % per_word)
        packed.append([
            signed(sum(value << (bits * place) for place, value in enumerate(row[first : first + per_word])))
            for first in range(0, len(row), per_word)
        ])  # fmt: skip
    return torch.tensor(packed, dtype=torch.int32)


class Weights:
    """Values [N, K], zero points [G, N] and scales [G, N] of a layer, and what they stand for."""

    def __init__(self, num_outputs: int, num_columns: int, group_size: int | None, bits: int, g_idx=None):
        most, self.bits, self.size = 1 << bits, bits, num_columns if group_size is None else group_size
        self.groups = -(-num_columns // self.size)
        self.values = torch.randint(0, most, (num_outputs, num_columns))
        self.zeros = torch.randint(1, most, (self.groups, num_outputs))
        self.scales = (0.5 + torch.rand(self.groups, num_outputs)).half() / most
        self.g_idx = torch.arange(num_columns) // self.size if g_idx is None else g_idx
        distance = self.values - self.zeros[self.g_idx].T
        self.dequantised = (distance.float() * self.scales[self.g_idx].T.float()).half()

    @property
    def symmetric(self) -> torch.Tensor:
        """What they stand for where zeros stand in the middle."""
        distance = self.values - (1 << (self.bits - 1))
        return (distance.float() * self.scales[self.g_idx].T.float()).half()


def read_back(layer: repack.Packed, num_columns: int) -> torch.Tensor:
    """What a repacked layer stands for, by the reference, in the order of x."""
    module = linear_w4a16 if layer.weight.shape[-1] == 16 else linear_w8a16
    x = torch.empty(1, num_columns, dtype=torch.float16)
    weights = module.dequantise(x, layer.weight, layer.scales, layer.zeros, layer.group_size)
    if layer.columns is None:
        return weights
    ordered = torch.empty_like(weights)
    ordered[:, layer.columns.long()] = weights
    return ordered


def shuffled(num_columns: int, size: int) -> torch.Tensor:
    return (torch.arange(num_columns) // size)[torch.randperm(num_columns)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_awq(size):
    weights = Weights(*size, 4)

    def pack(rows):  # place i of a word holds output AWQ_ORDER[i] of eight
        return words_of([[row[first + at] for first in range(0, len(row), 8) for at in AWQ_ORDER] for row in rows], 4)

    layer = repack.from_awq(pack(weights.values.T.tolist()), pack(weights.zeros.tolist()), weights.scales)
    assert torch.equal(read_back(layer, size[1]), weights.dequantised)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("bits", "is_v2", "has_order"), [*itertools.product((4, 8), (False, True), (False, True))])
def test_gptq(size, bits, is_v2, has_order):
    num_columns, group_size = size[1:]
    g_idx = shuffled(num_columns, group_size) if has_order and group_size is not None else None
    weights = Weights(*size, bits, g_idx)
    qweight = words_of(weights.values.tolist(), bits).T.contiguous()
    qzeros = words_of((weights.zeros - int(not is_v2)).tolist(), bits)
    layer = repack.from_gptq(qweight, qzeros, weights.scales, weights.g_idx, bits=bits, is_v2=is_v2)
    assert (layer.columns is not None) == (g_idx is not None and not torch.equal(g_idx, g_idx.sort()[0]))
    assert torch.equal(read_back(layer, num_columns), weights.dequantised)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("bits", "has_zeros", "has_order"), [*itertools.product((4, 8), (False, True), (False, True))])
def test_compressed_tensors(size, bits, has_zeros, has_order):
    num_outputs, num_columns, group_size = size
    g_idx = shuffled(num_columns, group_size) if has_order and group_size is not None else None
    weights = Weights(*size, bits, g_idx)
    zero_point = words_of(weights.zeros.tolist(), bits).T.contiguous() if has_zeros else None
    layer = repack.from_compressed(
        words_of(weights.values.tolist(), bits), weights.scales.T.contiguous(), zero_point, g_idx,
        shape=(num_outputs, num_columns), bits=bits,
    )  # fmt: skip
    assert torch.equal(read_back(layer, num_columns), weights.dequantised if has_zeros else weights.symmetric)


def test_zeros_in_the_middle_are_left_out():
    weights = Weights(16, 64, 32, 4)
    qweight, qzeros = words_of(weights.values.tolist(), 4).T, words_of(torch.full((2, 16), 7).tolist(), 4)
    layer = repack.from_gptq(qweight, qzeros, weights.scales)
    assert layer.zeros is None and torch.equal(read_back(layer, 64), weights.symmetric)


@pytest.mark.parametrize("shape", [(24,), (24, 1), (24, 2)], ids=str)
def test_int8(shape):
    weight, scale = torch.randint(-128, 128, (24, 128), dtype=torch.int8), torch.rand(shape).half() / 64
    by_column = scale.reshape(24, -1).repeat_interleave(128 // scale.reshape(24, -1).shape[1], dim=1)
    expected = (weight.float() * by_column.float()).half()
    assert torch.equal(read_back(repack.from_int8(weight, scale), 128), expected)


@pytest.mark.parametrize("shape", [(), (1,), (272,), (272, 1), (3, 2), (3, 1, 2, 1)], ids=str)
def test_fp8(shape):
    weight, scale = torch.randn(272, 200).to(torch.float8_e4m3fn), torch.rand(shape)
    if len(shape) > 1 and shape[0] == 3:
        by_block = scale.reshape(3, 2).repeat_interleave(128, 0)[:272].repeat_interleave(128, 1)[:, :200]
    else:
        by_block = scale.reshape(-1, 1)
    expected = weight.float() * by_block
    layer = repack.from_fp8(weight, scale)
    result = linear_fp8(torch.eye(200, dtype=torch.float64), layer.weight, layer.scales)
    torch.testing.assert_close(result.T, expected.double(), rtol=1e-6, atol=0)


def test_scales_of_blocks_are_no_scales_of_outputs():
    """One row of 32 blocks, of a weight that has 32 outputs too."""
    weight, scale = torch.randn(32, 4096).to(torch.float8_e4m3fn), torch.rand(1, 32)
    assert repack.from_fp8(weight, scale).scales.shape == (32, 1)
    assert repack.from_fp8(weight, scale.T.contiguous()).scales.shape == (32,)


def test_both_packings_agree():
    """The product's and the reference's, of whole and partly filled strips and blocks."""
    for bits, (num_outputs, num_columns) in itertools.product((4, 8), ((1, 1), (16, 128), (600, 300))):
        values = torch.randint(0, 1 << bits, (num_outputs, num_columns), dtype=torch.uint8)
        words = repack.pack_columns(values, bits)
        assert torch.equal(words, packing.pack(values, bits))
        assert torch.equal(packing.unpack(words, bits, num_outputs, num_columns), values.long())
    for group_size in (32, 64, 128):
        numbers = torch.randint(0, 99, (-(-300 // group_size), 5), dtype=torch.int16)
        paired = repack.pair_groups(numbers, 300, group_size)
        assert torch.equal(paired, packing.pair_groups(numbers, group_size, 300))
        by_column = packing.by_column(paired, group_size, 300)
        assert torch.equal(by_column, numbers.T.repeat_interleave(group_size, 1)[:, :300])


@pytest.mark.parametrize(("group_size", "has_zeros"), [(128, False), (64, True), (None, False)])
def test_joined(group_size, has_zeros):
    """Outputs side by side; of layers of which one has zero points, the others get theirs in the middle."""
    whole = [Weights(num_outputs, 256, group_size, 4) for num_outputs in (32, 16, 24)]
    layers, expected = [], []
    for number, weights in enumerate(whole):
        is_free = has_zeros and number == 1
        zero_point = words_of(weights.zeros.tolist(), 4).T.contiguous() if is_free else None
        scale, shape = weights.scales.T.contiguous(), (len(weights.values), 256)
        layers.append(
            repack.from_compressed(words_of(weights.values.tolist(), 4), scale, zero_point, shape=shape)
        )  # fmt: skip
        expected.append(weights.dequantised if is_free else weights.symmetric)
    layer = repack.joined(layers, [32, 16, 24])
    assert torch.equal(read_back(layer, 256), torch.cat(expected))
    with pytest.raises(ValueError, match=r"layers that are joined .* must have N of a multiple of 16.*got 24"):
        repack.joined(layers[::-1], [24, 16, 32])


def test_extra_memory_is_bounded():
    """Besides the words, what 512 outputs need, whatever their number."""
    seen = []

    def values(first, stop):
        seen.append(stop - first)
        return torch.zeros(stop - first, 64, dtype=torch.uint8)

    assert repack._packed(values, 3000, 64, 4, torch.device("cpu")).shape == (188, 1, 16, 16)
    assert max(seen) == 512 and sum(seen) == 3000


def from_gptq(**changed):
    weights = {
        "qweight": torch.zeros(8, 16, dtype=torch.int32), "qzeros": torch.zeros(2, 2, dtype=torch.int32),
        "scales": torch.ones(2, 16).half(),
    }  # fmt: skip
    return repack.from_gptq(**weights | changed)


def from_nan(scale: torch.Tensor):
    weight = torch.ones(16, 64)
    weight[3, 5] = float("nan")
    return repack.from_fp8(weight.to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_gptq(bits=3), "bits of quantised weights must be 4 or 8, got 3"),
        (lambda: from_gptq(qweight=torch.zeros(8, 16)), "qweight .* must have dtype int32, got torch.float32"),
        (lambda: from_gptq(qzeros=torch.zeros(2, 1, dtype=torch.int32)), r"qzeros .* must have shape \[2, 2\]"),
        (lambda: from_gptq(scales=torch.ones(4, 16).half()), "scales .* be for groups of 32, 64 or 128 of 64 columns"),
        (lambda: from_gptq(scales=torch.full((2, 16), float("inf")).half()), "scales .* must be finite"),
        (lambda: from_gptq(scales=torch.ones(2, 16)), "scales .* must have dtype float16 or bfloat16 for groups"),
        (lambda: from_gptq(g_idx=torch.zeros(64, dtype=torch.int32)), "g_idx .* must give each of 2 groups 32 columns"),
        (lambda: from_nan(torch.ones(16)), "weight .* must hold numbers, got NaN in rows from 0 on"),
        (lambda: from_nan(torch.ones(3)), "weight_scale .* must be one number"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
