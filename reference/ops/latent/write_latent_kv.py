"""Reference of write_latent_kv: rotary embedding, then rows by their slots."""

import torch

from ...rotary import rotate

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def write_latent_kv(
    latent: torch.Tensor, rope_key: torch.Tensor, latent_cache: torch.Tensor, slots: torch.Tensor,
    *, query: torch.Tensor | None = None, positions: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, is_interleaved: bool = False, latent_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/latent/write_latent_kv.py."""
    turned_query = latent.new_empty(latent.shape[0], 0, rope_key.shape[1])
    if cos is not None:
        rope_key = rotate(rope_key[:, None], positions, cos, sin, is_interleaved)[:, 0]
        if query is not None:
            turned_query = rotate(query, positions, cos, sin, is_interleaved)
    num_pages, page_size = latent_cache.shape[:2]
    slots = slots.flatten()
    is_written = (slots >= 0) & (slots < num_pages * page_size)
    slots = slots[is_written].to(torch.int64)
    rows, cache = torch.cat([latent, rope_key], dim=1)[is_written], latent_cache
    if cache.dtype in FP8:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        if latent_scale is not None:
            wide = wide / latent_scale.to(wide.dtype)
        largest = torch.finfo(cache.dtype).max
        # index assignment knows no 8-bit floats on some devices
        rows, cache = wide.clamp(-largest, largest).to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
    cache[slots // page_size, slots % page_size] = rows
    return turned_query
