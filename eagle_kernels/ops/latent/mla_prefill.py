"""Causal attention of prompts, or of chunks of them after what is cached already, over paged latents (MLA, absorbed).

Computes
    softmax(sm_scale * query . row) . latent per query row and head. With n queries and m keys, query i of a request is
    at position m - n + i. A program keeps a tile of (token, head) rows and loads each tile of latents once, for both
    products. The kernel is that of prefill_attention (ops/attention/shared/prompts.py).
Invariants
    Those of prefill_attention: keys that no row of a tile sees are not read; of a request of more than max_query
    queries the first max_query give what they give where all are attended; a row's bits depend on its own request and
    on max_query alone.
Grid
    (row tiles of all requests, 1), one program attends a tile of (token, head) rows.
Launches
    1
Traffic
    element bytes * (Hq * T * (D + latent_dim) + D * keys): queries and output once, latents once (and again for every
    tile of rows, out of the cache)
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from ..attention.shared import paged_cache
from ..attention.shared.attention import Output
from ..attention.shared.prompts import launch_prompts
from .shared.latents import as_attention, check_latents
from .shared.tiles import TUNING, choose_tiles


def contract(values: dict) -> Output:
    """Checks the arguments of `mla_prefill` and describes its outputs."""
    args = check.Arguments("mla_prefill", values)
    query = args.tensor("query", ("T", "Hq", "D"), check.FLOAT, contiguous=2)
    args.integer("max_query", 1)
    batch_size = paged_cache.check_bounds(args, args.size("T"))
    output = check_latents(args, query, batch_size)
    paged_cache.debug_cache(args, lambda filled: paged_cache.seen_by_prompts(values, filled))
    return output


@launcher
def mla_prefill(
    query: torch.Tensor,
    qo_indptr: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    latent_dim: int,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    latent_scale: torch.Tensor | None = None,
    max_query: int,
    is_causal: bool = True,
    window: int | None = None,
    out: Output | None = None,
) -> Output:
    """Attends prompts, or chunks of prompts, to the latents in their pages, their own included (MLA, absorbed).

    Symbols: B requests, T queries of all of them, Hq query heads, which share all keys. A row of D elements is a latent
    of latent_dim elements and a key of D - latent_dim elements that rotary embedding has turned, such as 512 + 64. A
    request's last keys are those of its queries.

    Args:
        query: [T, Hq, D] fp16, bf16 or fp32. The requests one after another. Of each head the query times the weights
            of its keys (absorbed), and the rotated part after it. Rows may be strided by multiples of D.
        qo_indptr: [B + 1] int. Request b has the queries query[qo_indptr[b]:qo_indptr[b + 1]].
        latent_cache: [num_pages, page_size, D], dtype of `query`, or 8-bit floats. As in `mla_decode`.
        latent_dim, sm_scale: as in `mla_decode`.
        block_table, seq_lens, kv_indptr, kv_indices, last_page_len: None, or [B, max_pages], [B], [B + 1], [*] and [B]
            int. A page table in one of two forms, as in `mla_decode`.
        latent_scale: None or [1] fp32. Factor of all elements of an 8-bit cache, at least 0.
        max_query: the most queries of a request, at least 1.
        is_causal: each query sees the keys up to its own. False: all keys of its request.
        window: at least 1; a query at position p sees the keys at positions above p - window. None: all.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [T, Hq, latent_dim], dtype of `query`. The latents, weighted by the softmax of the logits.
        lse: [T, Hq] fp32. Log of the sum of exp(logits).
        A row that sees no key (more queries than keys) has output 0 and lse -inf. Rows of no request, and those past
        max_query of a request, are not written.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: each indptr, max_query, lengths (0 to what the pages
        hold), and ids of seen pages; nothing outside the pool is read.

    Source:
        DeepSeek-V2, https://arxiv.org/abs/2405.04434 (multi-head latent attention, absorbed), on FlashAttention.

    Example:
        >>> latent_cache = torch.tensor([0.0, 2.0, 4.0]).repeat_interleave(6).view(3, 1, 6)  # 4 + 2 elements
        >>> result = eagle_kernels.mla_prefill(
        ...     torch.zeros(3, 1, 6), torch.tensor([0, 3]), latent_cache, latent_dim=4, sm_scale=1.0, max_query=3,
        ...     block_table=torch.tensor([[0, 1, 2]]), seq_lens=torch.tensor([3]))
        >>> result.output[:, 0, 0].round(decimals=3).tolist()  # of 0; of 0, 2; of 0, 2, 4
        [0.0, 1.0, 2.0]
    """
    values = locals()
    out = check.allocate("mla_prefill", contract(values), out)
    attention = as_attention(values)
    keys = (attention["k_cache"], None)
    launch_prompts("mla_prefill", attention, out, keys=keys, tuned=choose_tiles(TUNING, query, max_query))
    return out
