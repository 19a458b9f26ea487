"""Attention of a block of draft tokens over paged latents (MLA, absorbed), under a tree mask or as a chain.

Computes
    softmax(sm_scale * query . row) . latent per query row and head, over the slots 0..prefix - 1 and the drafts that
    the row sees, which are in the slots after the prefix. A program loads a tile of latents once, for both products and
    for all (token, head) rows of its tile; the programs of a request's other tiles of rows read the same latents at the
    same time. Masks, cuts and merges are those of tree_attention (ops/attention/shared).
Invariants
    Those of tree_attention. NaN in a query or in a row that is read stays in its request. Of a request of more than
    max_query rows, the first max_query are attended, and see at most max_query drafts.
    deterministic: bits do not depend on Nq, on other rows' masks, on the number of rows or on the batch.
Grid
    (row tiles, chunks), one program attends a tile of (token, head) rows to a chunk.
    deterministic: (.., shares), as in tree_attention.
    Merge: (B, programs, column tiles), one program merges some columns of every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one part
Traffic
    element bytes * D per slot, element bytes * B * Nq * Hq * (D + latent_dim), 8 B per mask word, and for the partial
    results of requests with more than one part 2 * 4 B * parts * Nq * Hq * (latent_dim + 1)
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from ..attention.shared import paged_cache
from ..attention.shared.attention import Output
from ..attention.shared.drafts import check_mask, check_positions, check_rows, seen_slots
from ..attention.shared.split_attention import launch_attention
from .shared.latents import as_attention, check_latents
from .shared.tiles import TUNING, choose_tiles


def contract(values: dict) -> Output:
    """Checks the arguments of `mla_tree_attention` and describes its outputs."""
    args = check.Arguments("mla_tree_attention", values)
    rows = check_rows(args)
    output = check_latents(args, rows.query, rows.batch)
    paged_cache.check_plan(args, rows.batch if rows.is_ragged else args.size("B"))
    check_mask(args, rows)
    check_positions(args, rows)
    paged_cache.debug_cache(args, lambda filled: seen_slots(values, filled, rows.num_keys, is_beside=False))
    return output


@launcher
def mla_tree_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    latent_dim: int,
    sm_scale: float,
    num_draft_keys: int | None = None,
    qo_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    latent_scale: torch.Tensor | None = None,
    is_causal: bool = False,
    max_query: int | None = None,
    window: int | None = None,
    deterministic: bool = False,
    plan: torch.Tensor | None = None,
    out: Output | None = None,
) -> Output:
    """Attends draft tokens to the latents of the prefix and to those of the drafts that a tree mask allows.

    It serves verification (Nk = Nq nodes), levels of a draft (Nq beams see the drafts of all levels so far) and chains
    (`is_causal`), for MLA in its absorbed form.

    Symbols: B requests, Nq = 1..256 rows (draft tokens) and Nk drafts in the cache of each, Hq query heads, which share
    all keys. A row of D elements is a latent of latent_dim elements and a key of D - latent_dim elements that rotary
    embedding has turned, such as 512 + 64. Slot t of a request is in its page t // page_size. Ragged calls
    (`qo_indptr`) have T rows of all requests, one after another, and Nk = Nq for each.

    Args:
        query: [B, Nq, Hq, D] fp16, bf16 or fp32; ragged [T, Hq, D]. Of each head the query times the weights of its
            keys (absorbed), and the rotated part after it. Rows may be strided by multiples of D.
        latent_cache: [num_pages, page_size, D], dtype of `query`, or 8-bit floats. As in `mla_decode`.
        tree_mask: None or [B, Nq, num_words] int64; ragged [T, num_words]. Bit j % 64 of word j // 64: the row sees
            draft j. There is a bit for each draft. Without `is_causal`.
        latent_dim, sm_scale: as in `mla_decode`.
        num_draft_keys: Nk, 1..512. None: Nq. Not for ragged calls.
        qo_indptr, positions, key_positions: None, or [B + 1], [B * Nq] (ragged [T]) and [B * Nk] int. As in
            `tree_attention`.
        block_table, seq_lens, kv_indptr, kv_indices, last_page_len: None, or [B, max_pages], [B], [B + 1], [*] and [B]
            int. A page table in one of two forms, as in `tree_attention`; the drafts are always in the cache.
        latent_scale: None or [1] fp32. Factor of all elements of an 8-bit cache, at least 0.
        is_causal, max_query, window: as in `tree_attention`.
        deterministic: a row's bits do not depend on rows around it; they equal those of `mla_decode` over the keys it
            sees, and so those of plain decoding along a node's path, even with `window`. Takes longer.
        plan: None or [B + 1] int32. From `plan_attention`, with the same lengths, drafts and window. Not used if
            deterministic.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [B, Nq, Hq, latent_dim], dtype of `query`; ragged [T, Hq, latent_dim]. The latents, weighted by the
            softmax of the logits.
        lse: [B, Nq, Hq] fp32; ragged [T, Hq]. Log of the sum of exp(logits).
        A row that sees no key has output 0 and lse -inf. Ragged rows of no request, and those past max_query of a
        request, are not written.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: each indptr, max_query, lengths (0 to what the pages
        hold, with the drafts), and ids of seen pages; nothing outside the pool is read. A row of `block_table` that is
        -1 throughout, or has no prefix, may pad the batch: its drafts are not checked. Never checked: elements of
        drafts must be finite, whether a row sees them or not.

    Source:
        DeepSeek-V2, https://arxiv.org/abs/2405.04434 (multi-head latent attention, absorbed); SpecInfer,
        https://arxiv.org/abs/2305.09781 (tree attention). The packed mask is eagle_kernels' own.

    Example:
        >>> latent_cache = torch.tensor([4.0, 0.0, 5.0, 8.0]).repeat_interleave(6).view(4, 1, 6)  # 4 + 2 elements
        >>> result = eagle_kernels.mla_tree_attention(
        ...     torch.zeros(1, 3, 1, 6), latent_cache, torch.tensor([[[1], [3], [5]]]), latent_dim=4, sm_scale=1.0,
        ...     block_table=torch.tensor([[0, 1, 2, 3]]), seq_lens=torch.tensor([1]))  # a prefix of one key
        >>> result.output[0, :, 0, 0].round(decimals=3).tolist()  # of 4, 0; of 4, 0, 5; of 4, 0, 8
        [2.0, 3.0, 4.0]
    """
    values = locals()
    out = check.allocate("mla_tree_attention", contract(values), out)
    num_query = query.shape[1] if qo_indptr is None else max_query
    launch_attention(
        "mla_tree_attention",
        as_attention(values),
        out,
        tuned=choose_tiles(TUNING, query, num_query),
        num_query=num_query,
        num_drafts=num_query if num_draft_keys is None else num_draft_keys,
        drafts="after" if kv_indptr is None else "counted",
    )
    return out
