"""Grouped-query attention with rotary embedding, of all layers or within a window: that of Llama and most families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....primitives.paging import MAX_HEAD_DIM, MIN_HEAD_DIM
from ....runtime.values import is_integer, shown
from ..protocol import Angles, Attend, KVShape, ModelError, StoringAttend, is_deterministic
from ..settings import check_fields, check_implemented, field_values, is_off, read_size, read_value
from .linear import Linear
from .norm import RMSNorm


@dataclass(kw_only=True)
class GroupedQuery:
    """Holds the settings, by Hugging Face's names apart from the last seven."""

    stored_sizes: ClassVar = {
        "self_attn.q_proj.weight": "num_attention_heads * head_dim",
        "self_attn.k_proj.weight": "num_key_value_heads * head_dim",
    }

    hidden_size: int
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int | None = None  # None: one per query head
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    partial_rotary_factor: float = 1.0  # the share of a head's coordinates that RoPE turns: the first ones
    qkv_bias: bool = False  # whether the projections into attention have a bias
    o_bias: bool = False  # whether the projection out of attention has a bias
    has_qk_norms: bool = False  # whether each query and key head has an RMS norm, before RoPE
    has_sinks: bool = False  # whether each query head has a score without a key
    turns_neighbours: bool = False  # RoPE turns coordinates 2 i and 2 i + 1, not i and i + half of those that turn
    linear: type[Linear] = Linear  # the kind
    windows: tuple[int | None, ...] = ()  # the keys that a token sees in each layer, itself included; None: all

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_fields(self)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads must be a multiple of num_key_value_heads = {kv_heads}, got {heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even, since RoPE rotates pairs, got {self.head_dim}")
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM:
            raise ModelError(f"head_dim must lie in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {self.head_dim}")
        if not 0 < self.rotary_size <= self.head_dim or self.rotary_size % 2:
            rule = f"must turn pairs of the {self.head_dim} coordinates of a head"
            raise ModelError(f"config.json: partial_rotary_factor {rule}, got {self.partial_rotary_factor}")

    @classmethod
    def read(cls, config: dict[str, Any], reader: str = "") -> GroupedQuery:
        """reader: what reads a config.json that is not a target's, in errors; it has no windows."""
        windows = _windows(config, reader)
        for window in filter(None, windows if reader else ()):
            raise ModelError(f"config.json: sliding_window={window} is not implemented for {reader}")
        settings = cls(**field_values(cls, config, windows=windows))
        size = settings.head_dim  # of which the scale of the scores is the usual one
        check_implemented(config, {"attention_multiplier": size**-0.5, "query_pre_attn_scalar": size})
        return settings

    def make(self, layer: int = 0, input_size: int | None = None) -> GroupedQueryAttention:
        """input_size: the width of the input, if it is not hidden_size."""
        return GroupedQueryAttention(self, layer, self.hidden_size if input_size is None else input_size)

    def kv_shape(self, num_layers: int) -> KVShape:
        return KVShape(num_layers, self.num_key_value_heads, self.head_dim)

    @property
    def rotary_size(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class GroupedQueryAttention(nn.Module):
    """Computes grouped-query attention around the caller's `attend`. [B, T, input_size] -> [B, T, H]."""

    def __init__(self, settings: GroupedQuery, layer: int, input_size: int) -> None:
        super().__init__()
        size, eps = settings.head_dim, settings.rms_norm_eps
        # layers after the last one are those of draft heads, which have none
        self.head_dim, self.window = size, settings.windows[layer] if layer < len(settings.windows) else None
        self.num_heads = [settings.num_attention_heads, settings.num_key_value_heads, settings.num_key_value_heads]
        sizes = {f"{name}_proj": count * size for name, count in zip("qkv", self.num_heads)}
        self.qkv_proj = settings.linear(input_size, sizes, settings.qkv_bias)
        self.o_proj = settings.linear(sizes["q_proj"], settings.hidden_size, settings.o_bias)
        self.neighbours = settings.rotary_size if settings.turns_neighbours else 0  # how many coordinates are such
        self.sinks = nn.Parameter(torch.empty(settings.num_attention_heads)) if settings.has_sinks else None
        self.q_norm = RMSNorm(size, eps) if settings.has_qk_norms else None
        self.k_norm = RMSNorm(size, eps) if settings.has_qk_norms else None

    def forward(self, x: Tensor, angles: Angles, attend: Attend, layer: int, in_parts: bool = False) -> Tensor:
        """in_parts: the result goes to `RMSNorm.add`, which takes parts."""
        deterministic = is_deterministic(attend)
        heads = self.qkv_proj(x, deterministic).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split(self.num_heads, dim=-2)
        if self.neighbours:
            turning = apart(heads[..., : sum(self.num_heads[:2]), :], self.neighbours)
            query, key = turning.split(self.num_heads[:2], dim=-2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        output = attend(layer, query, key, value, window=self.window, angles=angles, **sinks).flatten(-2)
        return self.o_proj(output, deterministic, in_parts)

    def store(self, x: Tensor, angles: Angles, attend: StoringAttend, layer: int) -> None:
        """Writes keys and values as `forward` does, and attends to nothing."""
        both = self.qkv_proj(x, skipped=self.num_heads[0] * self.head_dim)
        key, value = both.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)
        key = apart(key, self.neighbours) if self.neighbours else key
        if self.k_norm is not None:
            key = self.k_norm(key)
        attend.store(layer, key, value, angles=angles)


def apart(heads: Tensor, size: int) -> Tensor:
    """Returns heads with their first `size` coordinates in the order 0, 2, .., 1, 3, ..: then RoPE turns the halves of
    these, and no score changes."""
    turning = heads[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return turning if size == heads.shape[-1] else torch.cat((turning, heads[..., size:]), dim=-1)


def _windows(config: dict[str, Any], reader: str) -> tuple[int | None, ...]:
    """Returns the window of each layer; None for layers that see every token."""
    num_layers, max_length = read_size(config, "num_hidden_layers"), read_size(config, "max_position_embeddings")
    use, window = config.get("use_sliding_window", True), config.get("sliding_window")
    is_on = not is_off(use) and read_value(config | {"use_sliding_window": use}, "use_sliding_window", bool)
    window = read_size(config, "sliding_window") if is_on and not is_off(window) else None
    sliding, layer_types = config["sliding"], config.get("layer_types")
    if reader and isinstance(layer_types, list) and set(map(str, layer_types)) == {"full_attention"}:
        layer_types = ["full_attention"] * num_layers  # a file may list the target's
    first = config.get("max_window_layers", 0) if sliding != "all" else 0
    if not (is_integer(first) and first >= 0):
        raise ModelError(f"config.json: max_window_layers must be an integer of at least 0, got {shown(first)}")
    if sliding == "none" and window is not None:
        is_seen = window < max_length and first < num_layers
        if is_seen and layer_types != ["full_attention"] * num_layers:
            told = f"sliding_window={shown(window)} is not implemented for {reader or 'this model_type'}"
            raise ModelError(f"config.json: {told}")
        window = None
    num_full = num_layers if window is None else min(first, num_layers)
    computed = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    layer_types = computed if is_off(layer_types) else layer_types
    if sliding != "by layer" and layer_types != computed:
        raise ModelError(f"config.json: layer_types={shown(layer_types)} is not implemented for this model_type")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types must name each of {num_layers} layers, got {shown(layer_types)}")
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise ModelError(f"config.json: layer_types with {shown(layer_type)} is not implemented")
        if layer_type == "sliding_attention" and window is None:
            raise ModelError("config.json: layer_types names sliding_attention, but no sliding window is in use")
    if window is not None and window >= max_length:
        window = None  # no position is so far from another
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
