"""Reference of tree_attention: dense softmax under the unpacked mask, one request after another."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...paged_attention import attention, gather, page_tables


class Output(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor


def tree_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tree_mask: torch.Tensor,
    *,
    num_draft_keys: int,
    draft_key: torch.Tensor | None = None,
    draft_value: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> Output:
    """See eagle_kernels/ops/attention/tree_attention.py. Float64 tensors are computed in float64."""
    device, page_size = query.device, k_cache.shape[1]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    draft = torch.arange(num_draft_keys, device=device)
    visible = ((tree_mask[:, :, draft // 64] >> (draft % 64)) & 1).bool()
    tables = page_tables(page_size, block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    for request, (table, filled) in enumerate(tables):
        is_draft_counted = kv_indptr is not None and draft_key is None
        prefix = max(filled - num_draft_keys, 0) if is_draft_counted else filled
        end = filled if is_draft_counted else len(table) * page_size
        slots = torch.arange(prefix, device=device)
        if draft_key is None:
            slots = torch.cat([slots, torch.where(prefix + draft < end, prefix + draft, -1)])
        key, value, exists = gather((k_cache, v_cache), table, slots)
        if draft_key is not None:
            key, value = torch.cat([key, draft_key[request]]), torch.cat([value, draft_value[request]])
            exists = torch.cat([exists, torch.ones_like(draft, dtype=torch.bool)])
        sees = torch.cat([visible.new_ones(query.shape[1], prefix), visible[request]], dim=1) & exists
        output[request], lse[request] = attention(query[request], key, value, sees, sm_scale)
    return Output(output, lse)
