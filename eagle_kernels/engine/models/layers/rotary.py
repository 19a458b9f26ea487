"""Rotary position embedding: its settings, and the tables of its angles. Frequencies equal those of transformers
(modeling_rope_utils.py) bit for bit: its formulas in its order, in fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.values import is_fp32, shown
from ..checkpoint import brief, check_memory
from ..protocol import Angles, ModelError
from ..settings import check_fields, is_off, present, read_size, read_value, stated

# Scalings of the rotary frequencies, and the keys that each requires.
_ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
               "yarn": ()}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Holds `rope_scaling`, which transformers 5 calls `rope_parameters`, with the names of transformers."""

    size: int  # of a head, or of the part of it that turns
    num_positions: int  # those of the tables, from 0 on
    rope_type: str = "default"
    rope_theta: float = 10000.0
    original_max_position_embeddings: int | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        divisors = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
        # yarn divides by the logarithm of rope_theta
        bounds = {"rope_theta": 1 if self.rope_type == "yarn" else 0} | dict.fromkeys(divisors, 0)
        for name, bound in bounds.items():
            value = getattr(self, name)
            if value is not None and not value > bound:
                rule = f"must be above {bound} for rope_type={self.rope_type!r}"
                raise ModelError(f"config.json: {name} {rule}, got {shown(value)}")

    @classmethod
    def from_dict(cls, config: dict[str, Any], size: int) -> RopeConfig:
        """Reads a whole config.json; max_position_embeddings is the pretrained length if it names no other."""
        max_length = read_size(config, "max_position_embeddings")
        name, section = rope_section(config)
        rope_type = section.get("rope_type", section.get("type", "default"))
        nested = [key for key, value in section.items() if isinstance(value, dict)]
        if nested:
            told = ", ".join(brief(key) for key in nested[:4])
            raise ModelError(f"config.json: {name} that differs by layer ({told}) is not implemented")
        if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
            fault = f"of type {shown(rope_type)} is not implemented (only {', '.join(_ROPE_TYPES)})"
            raise ModelError(f"config.json: {name} {fault}")
        missing = [key for key in _ROPE_TYPES[rope_type] if key not in section]
        if missing:
            raise ModelError(f"config.json: {name} of type {rope_type!r} lacks {', '.join(missing)}")
        length = "original_max_position_embeddings"  # one beside the section has precedence over one inside
        values = {length: max_length} | present(config, ["rope_theta"])
        values |= present(section, [item.name for item in fields(cls)]) | present(config, [length])
        if rope_type == "yarn":
            values.setdefault("factor", max_length / read_size(values, length))
        return cls(**values | {"rope_type": rope_type, "size": size, "num_positions": max_length})


def rope_section(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the settings of the object in config.json that describes the rotary embedding."""
    name = "rope_parameters" if is_off(config.get("rope_scaling")) else "rope_scaling"
    return name, {} if is_off(config.get(name)) else stated(read_value(config, name, dict))


class Rotary(nn.Module):
    """Holds the half-split form, which rotates coordinates c and c + D / 2. positions [B, T] int64 -> `Angles`."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        num_positions = rope.num_positions
        # two thirds of these bytes are free again once the table is made
        need = f"config.json: max_position_embeddings={num_positions} needs {{}} for the angles of its positions"
        check_memory(10 * num_positions * rope.size, torch.device("cpu"), need)
        frequencies, factor = _inverse_frequencies(rope)
        if not ((frequencies * (num_positions - 1)).isfinite().all() and is_fp32(factor)):
            fault = f"turns position {num_positions - 1} by an angle too large for fp32"
            raise ModelError(f"config.json: the rotary embedding with rope_type={rope.rope_type!r} {fault}")
        # Always on the CPU: cos may differ in its last bit on other devices.
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.register_buffer("table", table, persistent=False)

    def _apply(self, function, recurse: bool = True):
        # The table follows the module to its device, but `.to(bfloat16)` must not round it nor `to_empty` lose it.
        self.table = self.table.to(function(self.table.new_empty(0)).device)
        return self

    def forward(self, positions: Tensor) -> Angles:
        return Angles(positions, *self.table.chunk(2, dim=-1))


def _inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """Returns the frequencies [D / 2] fp32 on the CPU, and the factor of cos and sin."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32, device="cpu") / rope.size
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.rope_theta**exponents)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Stretches long waves by `factor`, keeps short ones and interpolates between them, as in Llama 3.1."""
    length, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > length / low
    stretched = torch.where(is_long, frequencies / rope.factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * stretched / rope.factor + share * stretched
    return torch.where(is_long | (wavelengths < length / high), stretched, between)


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> tuple[Tensor, float]:
    """Stretches by `factor` the pairs that turn less than beta_slow times in the original length, and keeps those that
    turn more than beta_fast times, with a ramp between them, as in YaRN (arXiv 2309.00071); returns its attention
    temperature as the factor of cos and sin."""

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings
        return rope.size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rope.size // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    over, under = (rope.mscale, rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else (1.0, 0.0)
    growth = max(math.log(rope.factor), 0.0)
    return frequencies, (0.1 * over * growth + 1.0) / (0.1 * under * growth + 1.0)
