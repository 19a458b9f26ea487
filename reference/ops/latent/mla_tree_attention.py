"""Reference of mla_tree_attention: dense softmax under the unpacked mask, one request after another."""

import torch

from ...latents import attention, gather
from ...paged_attention import page_tables, request_bounds
from .mla_decode import Output


def mla_tree_attention(
    query: torch.Tensor, latent_cache: torch.Tensor, tree_mask: torch.Tensor | None = None,
    *, latent_dim: int, sm_scale: float, num_draft_keys: int | None = None, qo_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, key_positions: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, latent_scale: torch.Tensor | None = None, is_causal: bool = False,
    max_query: int | None = None, window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/latent/mla_tree_attention.py. Float64 tensors are computed in float64."""
    device, page_size, is_ragged = query.device, latent_cache.shape[1], qo_indptr is not None
    output = query.new_zeros(*query.shape[:-1], latent_dim)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)
    tables = page_tables(page_size, block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    num_rows = query.shape[:-2].numel()
    if is_ragged:
        bounds = request_bounds(qo_indptr, num_rows)
    else:
        bounds = [(each * query.shape[1], (each + 1) * query.shape[1]) for each in range(len(query))]
    queries, outputs, lses = (each.reshape(num_rows, *each.shape[query.dim() - 2 :]) for each in (query, output, lse))
    masks = None if tree_mask is None else tree_mask.reshape(num_rows, tree_mask.shape[-1])
    for request, ((first, last), (table, filled)) in enumerate(zip(bounds, tables)):
        # rows beyond max_query are not attended, but their keys are there
        counted = last - first if is_ragged or num_draft_keys is None else num_draft_keys
        last = min(last, first + max_query) if is_ragged else last
        rows = last - first
        num_keys = rows if is_ragged else counted
        draft = torch.arange(num_keys, device=device)
        if is_causal:
            visible = draft <= torch.arange(rows, device=device)[:, None] + num_keys - rows
        else:
            visible = ((masks[first:last][:, draft // 64] >> (draft % 64)) & 1).bool()
        prefix = filled if kv_indptr is None else max(filled - counted, 0)
        end = len(table) * page_size if kv_indptr is None else filled
        slots = torch.cat([torch.arange(prefix, device=device), torch.where(prefix + draft < end, prefix + draft, -1)])
        latents, exists = gather(latent_cache, table, slots, latent_scale, query.dtype)
        sees = torch.cat([visible.new_ones(rows, prefix), visible], dim=1) & exists
        if window is not None:
            own = prefix + torch.arange(rows, device=device) + num_keys - rows
            row_positions = own if positions is None else positions[first:last]
            drafted = prefix + draft
            if key_positions is not None:
                drafted = key_positions[request * num_keys : (request + 1) * num_keys]
            elif positions is not None:
                drafted = row_positions
            places = torch.cat([torch.arange(prefix, device=device), drafted])
            sees &= row_positions[:, None] - places < window
        outputs[first:last], lses[first:last] = attention(queries[first:last], latents, sees, latent_dim, sm_scale)
    return Output(output, lse)
