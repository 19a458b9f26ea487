"""Reference of write_kv: rotary embedding, then rows by their slots."""

import torch

from ...rotary import rotate

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
    *, query: torch.Tensor | None = None, positions: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, is_interleaved: bool = False, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/kv/write_kv.py."""
    turned_query = key.new_empty(key.shape[0], 0, key.shape[2])
    if cos is not None:
        key = rotate(key, positions, cos, sin, is_interleaved)
        if query is not None:
            turned_query = rotate(query, positions, cos, sin, is_interleaved)
    num_pages, page_size = k_cache.shape[:2]
    slots = slots.flatten()
    is_written = (slots >= 0) & (slots < num_pages * page_size)
    slots = slots[is_written].to(torch.int64)
    for cache, rows, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        rows = rows[is_written]
        if cache.dtype == torch.int8:
            rows = _divided(rows, scale).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
        elif cache.dtype in FP8:
            # index assignment knows no 8-bit floats on some devices
            cache, rows = cache.view(torch.uint8), _quantize(rows, scale, cache.dtype).view(torch.uint8)
        cache[slots // page_size, slots % page_size] = rows
    return turned_query


def _quantize(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, Hkv, D] over their scale, limited to what the dtype holds."""
    largest = torch.finfo(dtype).max
    return _divided(rows, scale).clamp(-largest, largest).to(dtype)


def _divided(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return wide if scale is None else wide / scale.reshape(-1, 1).to(wide.dtype)
