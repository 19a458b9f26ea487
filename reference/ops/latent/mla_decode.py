"""Reference of mla_decode: dense softmax, one request after another."""

from typing import NamedTuple

import torch

from ...latents import attention, gather
from ...paged_attention import page_tables


class Output(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor


def mla_decode(
    query: torch.Tensor, latent_cache: torch.Tensor,
    *, latent_dim: int, sm_scale: float, block_table: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None, latent_scale: torch.Tensor | None = None, window: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/latent/mla_decode.py. Float64 tensors are computed in float64."""
    outputs, lses = [], []
    tables = page_tables(latent_cache.shape[1], block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    for rows, (table, length) in zip(query[:, None], tables):
        slots = torch.arange(0 if window is None else max(length - window, 0), length, device=query.device)
        latents, exists = gather(latent_cache, table, slots, latent_scale, query.dtype)
        output, lse = attention(rows, latents, exists[None, :], latent_dim, sm_scale)
        outputs.append(output[0])
        lses.append(lse[0])
    if not outputs:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return Output(query[..., :latent_dim].contiguous(), query.new_empty(query.shape[:2], dtype=dtype))
    return Output(torch.stack(outputs), torch.stack(lses))
