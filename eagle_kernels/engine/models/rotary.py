"""Rotary position embedding: the frequencies of each scaling, and a table of their angles.

Frequencies equal those of transformers (modeling_rope_utils.py) bit for bit: its formulas in its order, in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...runtime.values import is_fp32
from .checkpoint import check_memory
from .decoder_config import DecoderConfig, RopeConfig
from .protocol import Angles, ModelError


class Rotary(nn.Module):
    """Holds the half-split form, which rotates coordinates c and c + D / 2. positions [B, T] int64 -> `Angles`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        num_positions = config.max_position_embeddings
        # two thirds of these bytes are free again once the table is made
        need = f"config.json: max_position_embeddings={num_positions} needs {{}} for the angles of its positions"
        check_memory(10 * num_positions * config.head_dim, torch.device("cpu"), need)
        frequencies, factor = _inverse_frequencies(config.rope, config.head_dim)
        if not ((frequencies * (num_positions - 1)).isfinite().all() and is_fp32(factor)):
            fault = f"turns position {num_positions - 1} by an angle too large for fp32"
            raise ModelError(f"config.json: the rotary embedding with rope_type={config.rope.rope_type!r} {fault}")
        # Always on the CPU: cos may differ in its last bit on other devices.
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.register_buffer("table", table, persistent=False)

    def _apply(self, function, recurse: bool = True) -> Rotary:
        # The table follows the module to its device, but `.to(bfloat16)` must not round it nor `to_empty` lose it.
        self.table = self.table.to(function(self.table.new_empty(0)).device)
        return self

    def forward(self, positions: Tensor) -> Angles:
        return Angles(positions, *self.table.chunk(2, dim=-1))


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Returns the frequencies [D / 2] fp32 on the CPU, and the factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.rope_theta**exponents, head_dim)
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


def _yarn(rope: RopeConfig, wavelengths: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Stretches by `factor` the pairs that turn less than beta_slow times in the original length, and keeps those that
    turn more than beta_fast times, with a ramp between them, as in YaRN (arXiv 2309.00071); returns its attention
    temperature as the factor of cos and sin."""

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    over, under = (rope.mscale, rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else (1.0, 0.0)
    growth = max(math.log(rope.factor), 0.0)
    return frequencies, (0.1 * over * growth + 1.0) / (0.1 * under * growth + 1.0)
