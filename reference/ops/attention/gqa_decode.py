"""Reference of gqa_decode: dense softmax, one request after another."""

from typing import NamedTuple

import torch

from ...paged_attention import attention, gather, page_tables, scaled_keys


class Output(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor


def gqa_decode(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    *, block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, sinks: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, sm_scale: float | None = None, soft_cap: float | None = None,
    window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/attention/gqa_decode.py. Float64 tensors are computed in float64."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty(query.shape[:2], dtype=dtype)
    tables = page_tables(k_cache.shape[1], block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    for request, (table, length) in enumerate(tables):
        slots = torch.arange(0 if window is None else max(length - window, 0), length, device=query.device)
        key, value, exists = gather((k_cache, v_cache), table, slots)
        key, value = scaled_keys(key, value, k_scale, v_scale, dtype)
        row_output, row_lse = attention(query[request][None], key, value, exists[None, :], sm_scale, soft_cap, sinks)
        output[request], lse[request] = row_output[0], row_lse[0]
    return Output(output, lse)
