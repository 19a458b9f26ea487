"""The formats of quantised linears: which tensors a linear has in the file, and how they become what the ops read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.linear.shared.repack import Packed, from_awq, from_compressed, from_fp8, from_gptq, from_int8
from .layers.quantised import PLAIN, Layout, Stored

_FLOATS, _HALVES = "F16 BF16 F32", "F16 BF16"


def _groups(num_columns: int, group_size: int) -> int:
    return 1 if group_size in (-1, num_columns) else -(-num_columns // group_size)


def _plain() -> Layout:
    def repack(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        return Packed(tensors["weight"].to(dtype), tensors["weight"])  # there are no scales

    return Layout(PLAIN, lambda n, k: {"weight": Stored(((n, k),), _FLOATS)}, repack)


def _awq(group_size: int) -> Layout:
    # AutoAWQ, awq/modules/linear/gemm.py, WQLinear_GEMM
    def stored(n: int, k: int) -> dict[str, Stored]:
        groups = _groups(k, group_size)
        return {"qweight": Stored(((k, n // 8),), "I32"), "qzeros": Stored(((groups, n // 8),), "I32"),
                "scales": Stored(((groups, n),), _HALVES)}  # fmt: skip

    return Layout("linear_w4a16", stored, lambda tensors, shape, dtype: from_awq(**tensors), 4)


def _gptq(group_size: int, bits: int, is_v2: bool) -> Layout:
    # GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py, BaseQuantLinear's buffers
    def stored(n: int, k: int) -> dict[str, Stored]:
        groups = _groups(k, group_size)
        return {"qweight": Stored(((k * bits // 32, n),), "I32"), "qzeros": Stored(((groups, n * bits // 32),), "I32"),
                "scales": Stored(((groups, n),), _HALVES), "g_idx": Stored(((k,),), "I32 I64", True)}  # fmt: skip

    op = f"linear_w{bits}a16"
    return Layout(op, stored, lambda tensors, shape, dtype: from_gptq(**tensors, bits=bits, is_v2=is_v2), bits)


def _packed(group_size: int, bits: int) -> Layout:
    # compressed-tensors, compressors/quantized_compressors/pack_quantized.py
    def stored(n: int, k: int) -> dict[str, Stored]:
        groups, per_word = _groups(k, group_size), 32 // bits
        scales = ((n, groups),) if groups > 1 else ((n, 1), (n,))
        return {"weight_packed": Stored(((n, -(-k // per_word)),), "I32"),
                "weight_scale": Stored(scales, _FLOATS if groups == 1 else _HALVES),
                "weight_zero_point": Stored(((-(-n // per_word), groups),), "I32", True),
                "weight_g_idx": Stored(((k,),), "I32 I64", True)}  # fmt: skip

    def repack(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        return from_compressed(**tensors, shape=shape, bits=bits)

    return Layout(f"linear_w{bits}a16", stored, repack, bits)


def _int8(group_size: int) -> Layout:
    # compressed-tensors, compressors/quantized_compressors/naive_quantized.py, int-quantized
    def stored(n: int, k: int) -> dict[str, Stored]:
        groups = _groups(k, group_size)
        scales = ((n, groups),) if groups > 1 else ((n, 1), (n,), (1,), ())
        return {"weight": Stored(((n, k),), "I8"), "weight_scale": Stored(scales, _FLOATS if groups == 1 else _HALVES)}

    return Layout("linear_w8a16", stored, lambda tensors, shape, dtype: from_int8(**tensors), 8)


def _fp8(scale: str = "weight_scale", in_blocks: bool = False) -> Layout:
    # DeepSeek-V3, inference/fp8_cast_bf16.py (weight_scale_inv); vllm/model_executor/layers/quantization, fp8.py,
    # fbgemm_fp8.py, modelopt.py and compressed_tensors for weight_scale
    def stored(n: int, k: int) -> dict[str, Stored]:
        rows, columns = -(-n // 128), -(-k // 128)
        shapes = ((rows, columns), (rows, 1, columns, 1)) if in_blocks else ((), (1,), (1, 1), (n, 1), (n,))
        return {"weight": Stored(((n, k),), "F8_E4M3"), scale: Stored(shapes, _FLOATS)}

    def repack(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        return from_fp8(tensors["weight"], tensors[scale])

    return Layout("linear_fp8", stored, repack, 8)


# The formats: what makes the layout of a linear.
LAYOUTS: dict[str, Callable[..., Layout]] = {
    "16 bit": _plain,
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "fp8": _fp8,
}
