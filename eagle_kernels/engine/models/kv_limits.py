"""The largest keys and values that a checkpoint calibrated, from its scales of the KV cache.

Scales belong to one 8-bit type, limits to none: a cache of any type divides by limit / (what the type holds). Names are
those that vLLM reads (vllm/model_executor/model_loader/weight_utils.py, maybe_remap_kv_scale_name): `k_scale` and
`v_scale` of the attention, of a module in it (latents' is `mla_attn.mla_attn`), or of a projection, `kv_scale` of both,
and `output_scale` of the projections of keys and values.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...runtime.values import shown
from .protocol import KVShape, LatentShape, ModelError
from .settings import is_off

_logger = logging.getLogger(__name__)

_NAMES = re.compile(
    r"(?:model\.)?layers\.(\d+)\.self_attn\."
    r"(?:(?:\w+\.){0,2}([kv])_scale|([kv])_proj\.output_scale|(?:\w+\.)?(kv)_scale|(?:\w+\.)?([kv])_zero_point)"
)
_LARGEST = {"float": 448.0, "int": 127.0}  # of float8_e4m3fn and int8


def read_kv_limits(
    config: dict[str, Any], exported: dict[str, Any], tensors: dict[str, Any], read: Callable[[str], Tensor],
    shape: KVShape | LatentShape,
) -> Tensor | None:  # fmt: skip
    """Returns the largest magnitudes [2, L, Hkv] float64 of keys and values, on the CPU; None: nothing calibrated them.
    Rows of latents take those of keys, as in vLLM and SGLang.

    Takes the scales out of `tensors`, the headers by name. config, exported: the contents of config.json and
    hf_quant_config.json. read: reads a tensor.
    """
    found: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}
    for name in list(tensors):
        match = _NAMES.fullmatch(name)
        if match is None:
            continue
        layer, kinds, zero_point = int(match[1]), match[2] or match[3] or match[4], match[5]
        value = _read_numbers(name, read(name), shape, is_scale=zero_point is None)
        del tensors[name]
        if zero_point is not None:
            if value.any():
                raise ModelError(f"tensor {name} must be 0, since keys and values have no zero points, got {value[0]}")
            continue
        for kind in kinds:
            found[kind][layer] = value
    if not any(found.values()):
        return None
    largest = _largest(config, exported)
    if largest is None:
        return None
    ones = torch.ones(
        shape.num_kv_heads, dtype=torch.float64, device="cpu"
    )  # as vLLM has it where a layer has no scale
    layers = range(shape.num_layers)
    stacked = [torch.stack([scales.get(layer, ones) for layer in layers]) for scales in found.values()]
    return torch.stack(stacked) * largest


def _read_numbers(name: str, tensor: Tensor, shape: KVShape | LatentShape, *, is_scale: bool) -> Tensor:
    """Returns a tensor of one number, or of one for each head, as [Hkv] float64."""
    if tensor.numel() not in (1, shape.num_kv_heads):
        heads = f"1 or num_key_value_heads = {shape.num_kv_heads} elements"
        rule = f"have {'1 element, for a row of latents' if hasattr(shape, 'latent_dim') else heads}"
        raise ModelError(f"tensor {name} must {rule}, got shape {shown(tuple(tensor.shape))}")
    value = tensor.double().flatten()
    if is_scale and not bool(((value > 0) & value.isfinite()).all()):
        worst = next(number for number in value.tolist() if not (number > 0 and math.isfinite(number)))
        raise ModelError(f"tensor {name} must be finite and above 0, got {worst}")
    return value.expand(shape.num_kv_heads)


def _largest(config: dict[str, Any], exported: dict[str, Any]) -> float | None:
    """Returns the largest number of the type that the scales are for; None, with a warning: it has not 8 bits."""
    section, beside = config.get("quantization_config"), exported.get("quantization")
    scheme = section.get("kv_cache_scheme") if isinstance(section, dict) else None
    algorithm = beside.get("kv_cache_quant_algo") if isinstance(beside, dict) else None
    if isinstance(scheme, dict):
        kind, bits = scheme.get("type", "float"), scheme.get("num_bits", 8)
        if kind in _LARGEST and bits == 8:
            return _LARGEST[kind]
        told = f"kv_cache_scheme with type={shown(kind)} and num_bits={shown(bits)}"
    elif is_off(algorithm) or algorithm in ("FP8", "INT8"):
        return _LARGEST["int" if algorithm == "INT8" else "float"]
    else:
        told = f"kv_cache_quant_algo={shown(algorithm)}"
    _logger.warning("scales of keys and values are not used: %s is not implemented (only 8 bits)", told)
    return None
