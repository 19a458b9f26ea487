"""Attention of one query token per request over paged latents (MLA, absorbed): split over the keys of the batch.

Computes
    softmax(sm_scale * query . row) . latent per request and query head, over the rows of the cache, whose first
    latent_dim elements are the latents. Latents are loaded once for all heads and serve both products. Cuts and merges
    are those of gqa_decode (ops/attention/shared).
Invariants
    Those of gqa_decode: slots past the end or before the window are not read; NaN in a query or in a seen row stays in
    its request; bits depend on how keys are cut, and with deterministic on the request alone.
Grid
    (row tiles, chunks), one program attends a tile of heads to a chunk. deterministic: (row tiles, shares), past 65535
    shares over two axes.
    Merge: (B, programs, column tiles), one program merges some columns of every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one part
Traffic
    element bytes * D per key, element bytes * B * Hq * (D + latent_dim), and for the partial results of requests with
    more than one part 2 * 4 B * parts * Hq * (latent_dim + 1)
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from ..attention.shared import paged_cache
from ..attention.shared.attention import Output
from ..attention.shared.split_attention import launch_attention
from .shared.latents import as_attention, check_latents
from .shared.tiles import TUNING, choose_tiles


def contract(values: dict) -> Output:
    """Checks the arguments of `mla_decode` and describes its outputs."""
    args = check.Arguments("mla_decode", values)
    output = check_latents(args, args.tensor("query", ("B", "Hq", "D"), check.FLOAT, contiguous=2), "B")
    paged_cache.check_plan(args, args.size("B"))
    paged_cache.debug_cache(args, lambda filled: (paged_cache.first_seen(filled - 1, values["window"]), filled))
    return output


@launcher
def mla_decode(
    query: torch.Tensor,
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
    window: int | None = None,
    deterministic: bool = False,
    plan: torch.Tensor | None = None,
    out: Output | None = None,
) -> Output:
    """Attends one query token per request to the latents in its pages (MLA in its absorbed form).

    Symbols: B requests, Hq query heads, which share all keys. A row of D elements is a latent of latent_dim elements
    and a key of D - latent_dim elements that rotary embedding has turned, such as 512 + 64. Slot t of a request is in
    its page t // page_size; the last one holds the query's own row.

    Args:
        query: [B, Hq, D] fp16, bf16 or fp32. Of each head the query times the weights of its keys (absorbed), and the
            turned part after it. Rows may be strided by multiples of D.
        latent_cache: [num_pages, page_size, D], dtype of `query`, or float8_e4m3fn or float8_e4m3fnuz if `query` is
            16-bit. page_size: a power of two, 1..256. Pages and slots may be strided by multiples of D.
        latent_dim: 4..512; D is at most 128 more.
        sm_scale: factor of the logits, above 0: 1 / sqrt(D) of the heads before they were absorbed, times what a
            scaling of the rotary embedding adds.
        block_table, seq_lens: None, or [B, max_pages] and [B] int. A page table as in vLLM: page ids (rows may be
            strided, and -1 throughout pads the batch) and number of keys of each request.
        kv_indptr, kv_indices, last_page_len: None, or [B + 1], [*] and [B] int. A CSR one, as in FlashInfer and SGLang:
            request b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]], the last with last_page_len[b] keys.
        latent_scale: None or [1] fp32. Factor of all elements of an 8-bit cache, at least 0.
        window: how many of the last keys are seen, at least 1. None: all.
        deterministic: a request's bits do not depend on the batch around it. Takes longer.
        plan: None or [B + 1] int32. From `plan_attention`, with the same lengths and window. Not used if deterministic.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [B, Hq, latent_dim], dtype of `query`. The latents, weighted by the softmax of the logits.
        lse: [B, Hq] fp32. Log of the sum of exp(logits).
        A request without keys has output 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: `kv_indptr`, lengths (0 to what the pages hold), and
        ids of seen pages; nothing outside the pool is read.

    Source:
        DeepSeek-V2, https://arxiv.org/abs/2405.04434 (multi-head latent attention, absorbed), on Flash-Decoding.

    Example:
        >>> latent_cache = torch.arange(4.0).repeat_interleave(6).view(4, 1, 6)  # pages of one slot, 4 + 2 elements
        >>> result = eagle_kernels.mla_decode(torch.zeros(1, 1, 6), latent_cache, latent_dim=4, sm_scale=1.0,
        ...     block_table=torch.tensor([[3, 0]]), seq_lens=torch.tensor([2]))
        >>> result.output.flatten().tolist()  # the mean of 3 and 0
        [1.5, 1.5, 1.5, 1.5]
    """
    values = locals()
    out = check.allocate("mla_decode", contract(values), out)
    launch_attention(
        "mla_decode",
        as_attention(values),
        out,
        tuned=choose_tiles(TUNING, query, 1),
        num_query=1,
        # the newest token is a draft block of one, as it is for the root of a tree
        num_drafts=1 if deterministic else 0,
        drafts="counted" if deterministic else "",
    )
    return out
