"""Attention of whole sequences without a cache, in plain PyTorch: of prompts, and of training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attend(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """`protocol.Attend` over the sequence itself."""
    visible = None
    if window is not None:
        rows = torch.arange(query.shape[1], device=query.device)
        distance = rows[:, None] - rows
        visible = (distance >= 0) & (distance < window)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )
    return output.transpose(1, 2)
