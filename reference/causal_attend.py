"""Attention over whole sequences without a cache, with derivatives: what the `Attend` of the engine means."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops.nn.rope import rope


def positions_of(tokens: Tensor) -> Tensor:
    """Returns 0, 1, 2, ... for every row of tokens [B, T]."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def rotate(
    query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor, Tensor], is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turns query and key [B, T, heads, D] by positions and tables of cos and sin, in fp32, and rounds once."""
    turned = rope(query.flatten(0, 1), key.flatten(0, 1), *angles, is_interleaved=is_interleaved)
    return turned.query.view(query.shape), turned.key.view(key.shape)


def causal_attend(
    layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None,
    *, angles: tuple[Tensor, Tensor, Tensor] | None = None, sm_scale: float | None = None,
    soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attends to the tokens of the sequence itself, as a `protocol.Attend` without a KV pool."""
    if angles is not None:
        query, key = rotate(query, key, angles)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if soft_cap is None and sinks is None:
        visible = None if window is None else _visible(query, window)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=sm_scale, enable_gqa=True
        )
        return output.transpose(1, 2)
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~_visible(query, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    probs = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (probs @ value).transpose(1, 2)


def _latents(
    layer: int, query: Tensor, latent: Tensor, rope_key: Tensor, *, angles: tuple[Tensor, Tensor, Tensor],
    is_interleaved: bool, sm_scale: float,
) -> Tensor:  # fmt: skip
    """Attends to the latents of the sequence itself, as `protocol.LatentAttend.latents` without a KV pool."""
    size = latent.shape[-1]
    turned_query, turned_key = rotate(query[..., size:], rope_key[:, :, None], angles, is_interleaved)
    query = torch.cat((query[..., :size], turned_query), dim=-1)
    key = torch.cat((latent[:, :, None], turned_key), dim=-1)
    return causal_attend(layer, query, key, latent[:, :, None], sm_scale=sm_scale)


causal_attend.latents = _latents


def _visible(query: Tensor, window: int | None) -> Tensor:
    """Returns [T, T] bool: which key each row of query [B, Hq, T, D] sees."""
    rows = torch.arange(query.shape[2], device=query.device)
    distance = rows[:, None] - rows
    return (distance >= 0) & (distance < (len(rows) if window is None else window))
