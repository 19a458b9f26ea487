"""Reference of prefill_attention: dense softmax under a causal mask, one request after another."""

import torch

from ...paged_attention import attention, gather, page_tables, request_bounds, scaled_keys
from .gqa_decode import Output


def prefill_attention(
    query: torch.Tensor, qo_indptr: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None,
    key_indptr: torch.Tensor | None = None,
    *, k_cache: torch.Tensor | None = None, v_cache: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, sinks: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, max_query: int, is_causal: bool = True, sm_scale: float | None = None,
    soft_cap: float | None = None, window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/attention/prefill_attention.py. Float64 tensors are computed in float64."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=dtype)
    if key is None:
        tables = page_tables(k_cache.shape[1], block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    else:
        key_bounds = request_bounds(qo_indptr if key_indptr is None else key_indptr, len(key))
    for request, (first, last) in enumerate(request_bounds(qo_indptr, len(query))):
        num_queries, last = last - first, min(last, first + max_query)
        if key is None:
            table, length = tables[request]
            slots = torch.arange(length, device=query.device)
            keys, values, exists = gather((k_cache, v_cache), table, slots)
            keys, values = scaled_keys(keys, values, k_scale, v_scale, dtype)
        else:
            begin, end = key_bounds[request]
            keys, values = key[begin:end], value[begin:end]
            exists = torch.ones(end - begin, dtype=torch.bool, device=query.device)
        num_keys = len(keys)
        places = torch.arange(num_keys, device=query.device)
        positions = num_keys - num_queries + torch.arange(last - first, device=query.device)
        sees = exists[None, :].expand(last - first, -1)
        if is_causal:
            sees = sees & (places <= positions[:, None])
        if window is not None:
            sees = sees & (positions[:, None] - places < window)
        rows = slice(first, last)
        output[rows], lse[rows] = attention(query[rows], keys, values, sees, sm_scale, soft_cap, sinks)
    return Output(output, lse)
