"""vLLM's linear layers of quantised weights: Marlin, Machete and CUTLASS, out of vLLM 0.26.0's own library.

vLLM must be importable where the benchmark runs: on the machine with the GPU, after `bash .peers/vllm/install.sh .`,
with `PYTHONPATH=/tmp/vsite:.`. Weights are repacked by vLLM's own functions, outside of the timed call. Rounding x to 8
bits is within.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

import torch

from eagle_kernels.reference.ops.linear.shared.packing import decode_e4m3, unpack

from ..harness.declaration import Run, Unavailable

_UTILS = "vllm.model_executor.layers.quantization.utils."


def marlin_w4a16(values: dict) -> Run:
    return _marlin(values, 4)


def marlin_w8a16(values: dict) -> Run:
    return _marlin(values, 8)


def machete_w4a16(values: dict) -> Run:
    return _machete(values, 4)


def machete_w8a16(values: dict) -> Run:
    return _machete(values, 8)


def marlin_fp8(values: dict) -> Run:
    """Marlin with weights of 8 bits and x in 16."""
    if values["activations"] != "16bit":
        raise Unavailable("multiplies x in 16 bit")
    _vllm()
    marlin = _module(_UTILS + "marlin_utils_fp8")
    x, weight, scales = values["x"], _codes_fp8(values), values["scales"]
    num_outputs, num_columns = weight.shape
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = num_outputs, num_columns
    layer.orig_dtype, layer.logical_widths = x.dtype, [num_outputs]
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if scales.dim() == 2:
        layer.weight_block_size = [128, 128]
        layer.weight_scale_inv = torch.nn.Parameter(scales.T.contiguous(), requires_grad=False)
    else:
        layer.weight_scale = torch.nn.Parameter(scales[:, None].contiguous(), requires_grad=False)
    marlin.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    packed = layer.weight_scale_inv if scales.dim() == 2 else layer.weight_scale
    return lambda: marlin.apply_fp8_marlin_linear(
        x, layer.weight, packed, layer.workspace, num_outputs, num_columns, None
    )


def cutlass_fp8(values: dict) -> Run:
    """CUTLASS with both in 8 bits; x is rounded by vLLM in the timed call."""
    ops, x, weight, scales = _vllm().ops, values["x"], _codes_fp8(values), values["scales"]
    kind = values["activations"]
    if kind == "16bit":
        raise Unavailable("rounds x to 8 bits")
    transposed = weight.T
    if kind == "token" and scales.dim() == 1:
        of_outputs = scales[None, :].contiguous()

        def run():
            codes, of_rows = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            return ops.cutlass_scaled_mm(codes, transposed, of_rows, of_outputs, x.dtype)

        return run
    if kind == "block" and scales.dim() == 2:
        of_blocks, round_groups = scales.T.contiguous().T, _module(_UTILS + "fp8_utils").per_token_group_quant_fp8

        def run_blocks():
            codes, of_rows = round_groups(x, 128, column_major_scales=True)
            return ops.cutlass_scaled_mm(codes, transposed, of_rows, of_blocks, x.dtype)

        return run_blocks
    raise Unavailable("has scales of rows with those of outputs, and of 128 columns with those of blocks")


def dequantised_fp8(values: dict) -> torch.Tensor:
    """Returns the weights of linear_fp8 in the dtype of x."""
    x, scales = values["x"], values["scales"]
    num_columns = x.shape[1]
    num_outputs = len(scales) if scales.dim() == 1 else 16 * len(values["weight"])
    decoded = decode_e4m3(torch.arange(256)).to(x.device, torch.float32)
    weight = decoded[unpack(values["weight"], 8, num_outputs, num_columns)]
    if scales.dim() == 2:
        by_output = scales.repeat_interleave(128, 0)[:num_columns].repeat_interleave(128, 1)[:, :num_outputs]
        return (weight * by_output.T).to(x.dtype)
    return (weight * scales[:, None]).to(x.dtype)


def _codes_fp8(values: dict) -> torch.Tensor:
    """Returns float8_e4m3fn [N, K]."""
    scales = values["scales"]
    num_outputs = len(scales) if scales.dim() == 1 else 16 * len(values["weight"])
    codes = unpack(values["weight"], 8, num_outputs, values["x"].shape[1])
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def _natural(values: dict, bits: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns GPTQ's words [K * bits / 32, N] of values with 8 (of 8 bits 128) on top, scales [G, N], and the columns
    of a group, -1 for whole rows."""
    if values.get("zeros") is not None:
        raise Unavailable("is compared with symmetric weights only")
    size, scales, num_columns = values["group_size"], values["scales"], values["x"].shape[1]
    scales = scales[None] if size is None else scales.permute(0, 2, 1).flatten(0, 1)[: -(-num_columns // size)]
    codes = unpack(values["weight"], bits, scales.shape[1], num_columns).T
    if bits == 8:
        codes = (codes + 128) % 256
    per_word = 32 // bits
    if num_columns % per_word:
        raise Unavailable(f"needs K of a multiple of {per_word}")
    shifts = bits * torch.arange(per_word, device=codes.device)[:, None]
    words = (codes.reshape(-1, per_word, codes.shape[1]) << shifts).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()
    return words, scales.to(values["x"].dtype).contiguous(), -1 if size is None else size


def _marlin(values: dict, bits: int) -> Run:
    vllm, utils = _vllm(), _module(_UTILS + "marlin_utils")
    x, (words, scales, group_size) = values["x"], _natural(values, bits)
    num_columns, num_outputs = x.shape[1], scales.shape[1]
    kind = vllm.types.uint4b8 if bits == 4 else vllm.types.uint8b128
    if not utils.check_marlin_supports_shape(num_outputs, num_columns, num_columns, group_size)[0]:
        raise Unavailable(f"does not take N = {num_outputs}, K = {num_columns}")
    none = utils.marlin_make_empty_g_idx(x.device)
    weight = vllm.ops.gptq_marlin_repack(words, none, num_columns, num_outputs, bits)
    permuted = utils.marlin_permute_scales(scales, num_columns, num_outputs, group_size)
    workspace = utils.marlin_make_workspace_new(x.device)
    return lambda: utils.apply_gptq_marlin_linear(
        x, weight, permuted, none, none, none, workspace, kind, num_outputs, num_columns, True
    )


def _machete(values: dict, bits: int) -> Run:
    vllm, x, (words, scales, group_size) = _vllm(), values["x"], _natural(values, bits)
    kind = vllm.types.uint4b8 if bits == 4 else vllm.types.uint8b128
    weight = vllm.ops.machete_prepack_B(words.T.contiguous().T, x.dtype, kind, x.dtype)
    return lambda: vllm.ops.machete_mm(
        a=x, b_q=weight, b_type=kind, b_group_scales=scales, b_group_size=group_size
    )  # fmt: skip


@functools.cache
def _vllm() -> SimpleNamespace:
    """vLLM's operators and types. Raises Unavailable where they are not."""
    if not torch.cuda.is_available():
        raise Unavailable("needs a GPU")
    platforms = _module("vllm.platforms")
    ops, types = _module("vllm._custom_ops"), _module("vllm.scalar_type").scalar_types
    if not platforms.current_platform.is_cuda():
        raise Unavailable("vLLM sees no GPU of NVIDIA")
    return SimpleNamespace(ops=ops, types=types)


def _module(name: str):
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs much of vLLM
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{name} cannot be imported: {type(error).__name__}: {reason}") from None
