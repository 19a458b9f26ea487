"""Reference of tree_attention: dense softmax under the unpacked mask, one request after another."""

import torch

from ...paged_attention import attention, gather, page_tables, request_bounds, scaled_keys
from .gqa_decode import Output


def tree_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tree_mask: torch.Tensor | None = None,
    *, num_draft_keys: int | None = None, draft_key: torch.Tensor | None = None,
    draft_value: torch.Tensor | None = None, qo_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, key_positions: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, sinks: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, is_causal: bool = False, max_query: int | None = None,
    sm_scale: float | None = None, soft_cap: float | None = None, window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/attention/tree_attention.py. Float64 tensors are computed in float64."""
    device, page_size = query.device, k_cache.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)
    tables = page_tables(page_size, block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    is_ragged = qo_indptr is not None
    bounds = request_bounds(qo_indptr, len(query)) if is_ragged else None
    queries = _rows(query, qo_indptr, max_query)
    outputs, lses = _rows(output, qo_indptr, max_query), _rows(lse, qo_indptr, max_query)
    masks = _rows(tree_mask, qo_indptr, max_query)
    draft_keys, draft_values = _rows(draft_key, qo_indptr, max_query), _rows(draft_value, qo_indptr, max_query)
    for request, (table, filled) in enumerate(tables):
        rows = len(queries[request])
        num_keys = rows if is_ragged or num_draft_keys is None else num_draft_keys
        draft = torch.arange(num_keys, device=device)
        if is_causal:
            visible = draft <= torch.arange(rows, device=device)[:, None] + num_keys - rows
        else:
            visible = ((masks[request][:, draft // 64] >> (draft % 64)) & 1).bool()
        is_draft_counted = kv_indptr is not None and draft_key is None
        # rows beyond max_query are not attended, but their keys are there
        counted = bounds[request][1] - bounds[request][0] if is_ragged else num_keys
        prefix = max(filled - counted, 0) if is_draft_counted else filled
        end = filled if is_draft_counted else len(table) * page_size
        slots = torch.arange(prefix, device=device)
        if draft_key is None:
            slots = torch.cat([slots, torch.where(prefix + draft < end, prefix + draft, -1)])
        key, value, exists = gather((k_cache, v_cache), table, slots)
        key, value = scaled_keys(key, value, k_scale, v_scale, dtype)
        if draft_key is not None:
            key = torch.cat([key, draft_keys[request].to(dtype)])
            value = torch.cat([value, draft_values[request].to(dtype)])
            exists = torch.cat([exists, torch.ones_like(draft, dtype=torch.bool)])
        sees = torch.cat([visible.new_ones(rows, prefix), visible], dim=1) & exists
        if window is not None:
            first = bounds[request][0] if is_ragged else request * rows
            own = prefix + torch.arange(rows, device=device) + num_keys - rows
            row_positions = own if positions is None else positions[first : first + rows]
            drafted = prefix + draft
            if key_positions is not None:
                drafted = key_positions[request * num_keys : (request + 1) * num_keys]
            elif positions is not None:
                drafted = row_positions
            places = torch.cat([torch.arange(prefix, device=device), drafted])
            sees &= row_positions[:, None] - places < window
        outputs[request][:], lses[request][:] = attention(queries[request], key, value, sees, sm_scale, soft_cap, sinks)
    return Output(output, lse)


def _rows(tensor: torch.Tensor | None, qo_indptr: torch.Tensor | None, max_query: int | None) -> list | None:
    """Views of a tensor's rows of each request: of [B, N, ...], or of [T, ...] between the bounds of qo_indptr."""
    if tensor is None:
        return None
    if qo_indptr is None:
        return list(tensor)
    bounds = request_bounds(qo_indptr, len(tensor))
    return [tensor[first : min(last, first + max_query)] for first, last in bounds]
