"""Quantised weights in the published layouts, written by hand from their definitions, and what they stand for. These
formats' own libraries need a GPU (AutoAWQ, GPTQModel, ModelOpt), or are a model's own program (DeepSeek's, Llama's).

Nothing is imported from the library, so that a shared mistake cannot hide.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
# Which output each place of AWQ's words holds.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Written = tuple[dict[str, Tensor], Tensor]


class Format(NamedTuple):
    section: dict  # `quantization_config`
    listed: str  # its key for modules that are not converted
    write: Callable[[Tensor], Written]  # weight [N, K] -> tensors by the ends of their names, and what they stand for


def words(values: Tensor, bits: int) -> Tensor:
    """[.., n] -> [.., n * bits / 32] int32, the first value in the lowest bits."""
    places = values.long().unflatten(-1, (-1, 32 // bits))
    packed = sum(places[..., place] << (bits * place) for place in range(32 // bits))
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _rounded(weight: Tensor, bits: int, g_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K], zero points [N, G] and scales [N, G] of groups of columns, and no symmetry."""
    groups = range(int(g_idx.max()) + 1)
    least, most = (torch.stack([at(weight[:, g_idx == group], 1) for group in groups], 1)
                   for at in (torch.amin, torch.amax))  # fmt: skip
    scale = ((most - least) / (2**bits - 1)).half()
    zero = (-least / scale.float()).round().clamp(1, 2**bits - 1).long()
    value = (weight / scale.float()[:, g_idx]).round().long() + zero[:, g_idx]
    return value.clamp(0, 2**bits - 1), zero, scale


def _meaning(value: Tensor, zero: Tensor, scale: Tensor, g_idx: Tensor) -> Tensor:
    return (value - zero[:, g_idx]).float() * scale.float()[:, g_idx]


def _usual(weight: Tensor) -> Tensor:
    return torch.arange(weight.shape[1]) // GROUP


def awq(weight: Tensor) -> Written:
    g_idx = _usual(weight)
    value, zero, scale = _rounded(weight, 4, g_idx)

    def packed(rows: Tensor) -> Tensor:
        return words(rows.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4)

    tensors = {"qweight": packed(value.T), "qzeros": packed(zero.T), "scales": scale.T}
    return tensors, _meaning(value, zero, scale, g_idx)


def gptq(weight: Tensor, bits: int = 4, is_v2: bool = False, has_order: bool = False) -> Written:
    g_idx = _usual(weight)
    if has_order:
        # another order for each number of columns; layers of one input have the same
        g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(len(g_idx)))]
    value, zero, scale = _rounded(weight, bits, g_idx)
    tensors = {"qweight": words(value, bits).T, "qzeros": words(zero.T - int(not is_v2), bits), "scales": scale.T,
               "g_idx": g_idx.int()}  # fmt: skip
    return tensors, _meaning(value, zero, scale, g_idx)


def _fp8(weight: Tensor, scale: Tensor, name: str, stored: Tensor) -> Written:
    value = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": value, name: stored}, value.float() * scale


def fp8_tensor(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    tensors, meaning = _fp8(weight, scale, "weight_scale", scale)
    return tensors | {"input_scale": torch.tensor(0.5)}, meaning


def fp8_channel(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return _fp8(weight, scale, "weight_scale", scale)


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> Written:
    rows, columns = (math.ceil(size / 128) for size in weight.shape)
    scale = torch.stack([
        torch.stack([weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].abs().max() for j in range(columns)])
        for i in range(rows)
    ]) / 448  # fmt: skip
    whole = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    stored = scale if name == "weight_scale_inv" else scale[:, None, :, None].contiguous()
    return _fp8(weight, whole, name, stored)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "lm_head": False,
         "damp_percent": 0.01, "static_groups": False, "true_sequential": True}  # fmt: skip
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.37.0"}}
NOT_CONVERTED = "modules_to_not_convert"
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
                  NOT_CONVERTED, awq),
    "gptq": Format(_GPTQ, NOT_CONVERTED, gptq),
    "gptq v2": Format(_GPTQ | {"checkpoint_format": "gptq_v2"}, NOT_CONVERTED, lambda w: gptq(w, is_v2=True)),
    "gptq desc_act": Format(_GPTQ | {"desc_act": True, "checkpoint_format": "gptq"}, NOT_CONVERTED,
                            lambda w: gptq(w, has_order=True)),
    "gptq 8": Format(_GPTQ | {"bits": 8}, NOT_CONVERTED, lambda w: gptq(w, bits=8)),
    "fp8 blocks": Format(_FP8 | {"weight_block_size": [128, 128]}, NOT_CONVERTED, fp8_blocks),
    "fp8 tensor": Format(_FP8 | {"activation_scheme": "static"}, "ignored_layers", fp8_tensor),
    "fbgemm_fp8": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, NOT_CONVERTED, fp8_channel),
    "modelopt": Format(_MODELOPT | {"quant_algo": "FP8"}, "ignore", fp8_tensor),
    "modelopt channel": Format(_MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "ignore", fp8_channel),
    "modelopt blocks": Format(_MODELOPT | {"quant_algo": "fp8_pb_wo"}, "ignore",
                              lambda w: fp8_blocks(w, "weight_scale")),
}  # fmt: skip
LINEAR = re.compile(r"(_proj|^fc|\.fc)\.weight$")


def write_quantised(form: Format, plain: Path, folder: Path, listed: tuple[str, ...] = ()) -> Path:
    """Writes to `folder` the model of `plain` with quantised linears, apart from those whose names hold a listed one;
    `plain` gets the weights that they stand for."""
    from safetensors.torch import load_file, save_file

    tensors, meant = load_file(plain / "model.safetensors"), {}
    quantised = {}
    for name, tensor in tensors.items():
        if LINEAR.search(name) and not any(part in name for part in listed):
            written, meant[name] = form.write(tensor.float())
            quantised |= {f"{name.removesuffix('weight')}{kind}": each for kind, each in written.items()}
        else:
            quantised[name] = meant[name] = tensor
    for where, which in ((plain, meant), (folder, quantised)):
        where.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in which.items()}, where / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    section = form.section | {form.listed: list(listed)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder
