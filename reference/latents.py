"""Paged latents and dense attention over them; what the references of the ops of latent attention share."""

import torch

from . import paged_attention


def gather(
    latent_cache: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, latent_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns rows [slots, D] of the cache times their scale, 0 where a slot does not exist, and whether each exists.
    They are float64 for queries of that dtype, else float32."""
    rows, exists = paged_attention.gather((latent_cache[:, :, None],), table, slots)
    rows = rows[:, 0].to(torch.float64 if dtype == torch.float64 else torch.float32)
    return rows if latent_scale is None else rows * latent_scale.to(rows.dtype), exists


def attention(query, latents, visible, latent_dim: int, sm_scale: float):
    """Returns output [rows, Hq, latent_dim] and lse [rows, Hq] of query [rows, Hq, D] over latents [keys, D].
    visible: bool [rows, keys]."""
    latents = latents[:, None]
    return paged_attention.attention(query, latents, latents[..., :latent_dim], visible, sm_scale)
