"""Reference of mla_prefill: dense softmax under a causal mask, one request after another."""

import torch

from ...latents import attention, gather
from ...paged_attention import page_tables, request_bounds
from .mla_decode import Output


def mla_prefill(
    query: torch.Tensor, qo_indptr: torch.Tensor, latent_cache: torch.Tensor,
    *, latent_dim: int, sm_scale: float, block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, latent_scale: torch.Tensor | None = None, max_query: int,
    is_causal: bool = True, window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/latent/mla_prefill.py. Float64 tensors are computed in float64."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_zeros(*query.shape[:-1], latent_dim)
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=dtype)
    tables = page_tables(latent_cache.shape[1], block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    for (first, last), (table, length) in zip(request_bounds(qo_indptr, len(query)), tables):
        num_queries, last = last - first, min(last, first + max_query)
        slots = torch.arange(length, device=query.device)
        latents, exists = gather(latent_cache, table, slots, latent_scale, query.dtype)
        positions = length - num_queries + torch.arange(last - first, device=query.device)
        sees = exists[None, :].expand(last - first, -1)
        if is_causal:
            sees = sees & (slots <= positions[:, None])
        if window is not None:
            sees = sees & (positions[:, None] - slots < window)
        output[first:last], lse[first:last] = attention(query[first:last], latents, sees, latent_dim, sm_scale)
    return Output(output, lse)
