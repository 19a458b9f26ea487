"""Latent attention (MLA) of DeepSeek-V2, V3 and their kin (arXiv 2405.04434), in its absorbed form.

A token's cache row is one latent c and one key r that turns, for all heads. Of head h, with the halves of kv_b_proj's
weights W_k and W_v [.., L]:

    score = sm_scale · (q W_k · c + q_turned · r)      q, q_turned: the parts of the query that stay and turn
    value = (Σ probability · c) W_vᵀ                   which is the sum of the values of all tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.latent.shared.latents import MAX_LATENT_DIM, MAX_ROPE_DIM, MIN_LATENT_DIM
from ..protocol import Angles, LatentAttend, LatentShape, ModelError, is_deterministic
from ..settings import check_fields, check_implemented, field_values
from .linear import Linear
from .norm import RMSNorm
from .rotary import RopeConfig

# of the norms of a target's latents, whatever rms_norm_eps is: transformers and DeepSeek's own code take their norm's
# default. Those of heads have rms_norm_eps in the code that trains them, and in vLLM and SGLang.
_LATENT_EPS = 1e-6


@dataclass(kw_only=True)
class LatentQuery:
    """Holds the settings, by Hugging Face's names apart from the last three."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None = None  # None: queries are projected at once
    kv_lora_rank: int  # L, the size of a latent
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # R
    v_head_dim: int
    attention_bias: bool = False  # whether the projections to latents and out of attention have a bias
    rope_interleave: bool = True  # whether pairs that turn are neighbours
    linear: type[Linear] = Linear  # the kind
    sm_scale: float | None = None  # of the scores
    latent_eps: float = _LATENT_EPS  # of the norms of latents

    def __post_init__(self) -> None:
        check_fields(self)
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim must be even, since RoPE rotates pairs, got {self.qk_rope_head_dim}")
        if not MIN_LATENT_DIM <= self.kv_lora_rank <= MAX_LATENT_DIM or self.kv_lora_rank % 2:
            rule = f"must be even and lie in {MIN_LATENT_DIM}..{MAX_LATENT_DIM}"
            raise ModelError(f"kv_lora_rank {rule}, got {self.kv_lora_rank}")
        if self.qk_rope_head_dim > MAX_ROPE_DIM:
            raise ModelError(f"qk_rope_head_dim must be at most {MAX_ROPE_DIM}, got {self.qk_rope_head_dim}")
        if self.sm_scale is None:
            self.sm_scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        # what the cache holds: all heads read one row
        self.num_key_value_heads, self.head_dim = 1, self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def read(cls, config: dict[str, Any], reader: str = "") -> LatentQuery:
        """reader: as for `GroupedQuery.read`."""
        latent_eps = config["rms_norm_eps"] if reader == "heads" else _LATENT_EPS
        settings = cls(**field_values(cls, config, sm_scale=None, latent_eps=latent_eps))
        heads, others = settings.num_attention_heads, ("sliding_window", "index_topk", "mla_use_nope")
        check_implemented(config, {"num_key_value_heads": heads} | dict.fromkeys(others))
        rope = RopeConfig.from_dict(config, settings.qk_rope_head_dim)
        if rope.rope_type != "default" and rope.mscale_all_dim is not None and rope.mscale_all_dim > 0:
            growth = 1.0 + 0.1 * rope.mscale_all_dim * math.log(rope.factor) if rope.factor > 1 else 1.0
            settings.sm_scale *= growth * growth
        return settings

    def make(self, layer: int = 0, input_size: int | None = None) -> LatentAttention:
        """input_size: the width of the input, if it is not hidden_size."""
        return LatentAttention(self, self.hidden_size if input_size is None else input_size)

    def kv_shape(self, num_layers: int) -> LatentShape:
        return LatentShape(num_layers, 1, self.head_dim, self.kv_lora_rank)

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def stored_sizes(self) -> dict[str, str]:
        heads = "num_attention_heads * {} + num_attention_heads * {}".format
        of_query = heads("qk_nope_head_dim", "qk_rope_head_dim")
        sizes = {"kv_b_proj": heads("qk_nope_head_dim", "v_head_dim")}
        sizes |= {"kv_a_proj_with_mqa": "kv_lora_rank + qk_rope_head_dim"}
        if self.q_lora_rank is None:
            sizes |= {"q_proj": of_query}
        else:
            sizes |= {"q_a_proj": "q_lora_rank", "q_b_proj": of_query}
        return {f"self_attn.{name}.weight": size for name, size in sizes.items()}


class LatentAttention(nn.Module):
    """Computes latent attention around the caller's `attend.latents`. [B, T, input_size] -> [B, T, H]."""

    def __init__(self, settings: LatentQuery, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.sm_scale = settings.num_attention_heads, settings.sm_scale
        self.sizes = settings.qk_nope_head_dim, settings.v_head_dim
        self.latent_dim, self.is_interleaved = settings.kv_lora_rank, settings.rope_interleave
        has_bias, rank, row = settings.attention_bias, settings.q_lora_rank, settings.head_dim
        of_query = self.num_heads * (settings.qk_nope_head_dim + settings.qk_rope_head_dim)
        if rank is None:
            self.q_proj = settings.linear(input_size, of_query, bias=False)
            self.kv_a_proj_with_mqa = settings.linear(input_size, row, bias=has_bias)
        else:
            self.split = [rank, settings.kv_lora_rank, settings.qk_rope_head_dim]
            self.a_proj = settings.linear(input_size, {"q_a_proj": rank, "kv_a_proj_with_mqa": row}, has_bias)
            self.q_a_layernorm = RMSNorm(rank, settings.latent_eps)
            self.q_b_proj = settings.linear(rank, of_query, bias=False)
        self.kv_a_layernorm = RMSNorm(settings.kv_lora_rank, settings.latent_eps)
        self.kv_b_proj = settings.linear(settings.kv_lora_rank, self.num_heads * sum(self.sizes), bias=False)
        self.o_proj = settings.linear(self.num_heads * settings.v_head_dim, settings.hidden_size, has_bias)
        self.has_rank = rank is not None
        self._widened: Tensor | None = None  # the weight of kv_b_proj, if that is quantised

    def forward(self, x: Tensor, angles: Angles, attend: LatentAttend, layer: int, in_parts: bool = False) -> Tensor:
        """in_parts: the result goes to `RMSNorm.add`, which takes parts."""
        deterministic = is_deterministic(attend)
        query, latent, rope_key = self._project(x, deterministic)
        staying, turning = query.split([self.sizes[0], query.shape[-1] - self.sizes[0]], dim=-1)
        of_keys, of_values = self._weight().unflatten(0, (self.num_heads, -1)).split(self.sizes, dim=1)
        absorbed = torch.cat((by_head(staying, of_keys, deterministic), turning), dim=-1)
        options = {"angles": angles, "is_interleaved": self.is_interleaved, "sm_scale": self.sm_scale}
        attended = attend.latents(layer, absorbed, latent, rope_key, **options)
        output = by_head(attended, of_values.transpose(1, 2), deterministic).flatten(-2)
        return self.o_proj(output, deterministic, in_parts)

    def store(self, x: Tensor, angles: Angles, attend: LatentAttend, layer: int) -> None:
        """Writes latents as `forward` does, and attends to nothing."""
        if self.has_rank:
            row = self.a_proj(x, skipped=self.split[0])
        else:
            row = self.kv_a_proj_with_mqa(x)
        latent, rope_key = row[..., : self.latent_dim], row[..., self.latent_dim :]
        options = {"angles": angles, "is_interleaved": self.is_interleaved}
        attend.store_latents(layer, self.kv_a_layernorm(latent), rope_key, **options)

    def _project(self, x: Tensor, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries [B, T, Hq, D], the latents, and the keys that turn."""
        if self.has_rank:
            narrow, latent, rope_key = self.a_proj(x, deterministic).split(self.split, dim=-1)
            query = self.q_b_proj(self.q_a_layernorm(narrow), deterministic)
        else:
            row = self.kv_a_proj_with_mqa(x, deterministic)
            latent, rope_key = row[..., : self.latent_dim], row[..., self.latent_dim :]
            query = self.q_proj(x, deterministic)
        return query.unflatten(-1, (self.num_heads, -1)), self.kv_a_layernorm(latent), rope_key

    def _weight(self) -> Tensor:
        """Returns the weight of kv_b_proj [Hq * (..), L], in 16 bit where it is quantised: products with its halves are
        by head."""
        weight = getattr(self.kv_b_proj, "weight", None)
        if weight is not None:
            return weight
        norm = self.kv_a_layernorm.weight
        if self._widened is None or self._widened.device != norm.device:
            unit = torch.eye(self.latent_dim, dtype=norm.dtype, device=norm.device)
            self._widened = self.kv_b_proj(unit[None])[0].T.contiguous()
        return self._widened


def by_head(x: Tensor, weight: Tensor, deterministic: bool) -> Tensor:
    """Multiplies x [B, T, Hq, K] by the weight [Hq, K, N] of each head. -> [B, T, Hq, N]."""
    rows = x.flatten(0, 1).transpose(0, 1)
    if deterministic and x.is_cuda:  # a row at a time, since the bits of a product may depend on its number of rows
        product = torch.cat([torch.bmm(row, weight) for row in rows.split(1, dim=1)], dim=1)
    else:
        product = torch.bmm(rows, weight)
    return product.transpose(0, 1).unflatten(0, x.shape[:2])
