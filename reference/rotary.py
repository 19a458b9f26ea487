"""Rotary position embedding of heads, as PyTorch's rules of types round it; what rope and write_kv share."""

import torch


def rotate(
    heads: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> torch.Tensor:
    """Returns heads [T, heads, D] turned by rows `positions` of cos and sin; without such a row they stay.
    positions: [T], or [B, T / B]."""
    positions = positions.flatten()
    num_positions, num_pairs = cos.shape
    is_known = (positions >= 0) & (positions < num_positions)
    if not is_known.any():
        return heads.clone()
    row = torch.where(is_known, positions, 0).to(torch.int64)
    cos, sin = cos[row][:, None], sin[row][:, None]  # [T, 1, pairs]
    turning, rest = heads[..., : 2 * num_pairs], heads[..., 2 * num_pairs :]
    if is_interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(turned, dim=-1).flatten(-2) if is_interleaved else torch.cat(turned, dim=-1)
    return torch.where(is_known[:, None, None], torch.cat((turned.to(heads.dtype), rest), dim=-1), heads)
