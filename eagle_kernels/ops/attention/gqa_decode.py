"""Attention of one query token per request over a paged KV cache, with grouped query heads.

Computes
    output = softmax(sm_scale * query . key) . value per request and query head over the slots 0..length - 1, of which
    the last is the query's own. Flash-Decoding: keys are cut into shares of about equal size (shared/shares.py),
    each is attended with an online softmax, and partial results merge by their log-sum-exp.
    soft_cap: logits become soft_cap * tanh(logits / soft_cap), with an error of about soft_cap * 1e-7. window: only the
    last `window` slots are seen. sinks: a logit per query head that takes probability and has no value (gpt-oss).
    k_scale, v_scale: factors, at least 0, of the cached keys and values. lse: log of the sum of exp(logits), with the
    sink.
Shapes
    query          [B, Hq, D]                      float  D in 16..256; Hq a multiple of Hkv; rows may be strided
    k_cache        [num_pages, page_size, Hkv, D]  as query, or fp8 with 16-bit queries; page_size a power of
                                                          two in 1..256; pages may be strided
    v_cache        as k_cache
    block_table    [B, max_pages]                  int    page ids, with
    seq_lens       [B]                             int    length
    kv_indptr      [B + 1]                         int    or: where a request's page ids start, with
    kv_indices     [*]                             int    page ids, and
    last_page_len  [B]                             int    filled slots of the last page;
                                                          length = (pages - 1) * page_size + last_page_len
    sinks          [Hq]                            float  or None
    k_scale        [1] or [Hkv]                    fp32   or None
    v_scale        as k_scale
    -> output      [B, Hq, D]                      as query
    -> lse         [B, Hq]                         fp32, natural logarithm
Invariants
    A request without keys has output 0 and lse -inf (or its sink). Slots past the end or before the window are not
    read, nor are pages outside the pool; page ids of seen slots must lie within it. NaN in a query or in a seen key
    stays in its request and KV head.
    deterministic: bits depend on the request's own query, keys and length alone, not on the batch, on padding, or on
    the size of the page table; they are those of the root of a tree in tree_attention whose draft block is in the pool.
    Otherwise they also depend on the lengths of the batch, which decide how keys are cut.
Grid
    (Hkv * row tiles, shares), one program attends the heads of a group to a share; merge: (B, programs), one program
    merges every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one share
Traffic
    2 * element bytes * Hkv * D per key, 2 * element bytes * B * Hq * D, and for the partial results of requests with
    more than one share 2 * 4 B * shares * Hq * (D + 1).
"""

from __future__ import annotations

import torch

from ...primitives import paging
from ...runtime import check, tuning
from ...runtime.launch import launcher
from .shared import paged_cache
from .shared.attention import Output
from .shared.split_attention import launch_attention

# See `split_attention.ORDERED_TUNING`, which deterministic calls use instead; gfx942 has 64 KiB of shared memory.
_ROW = {"max_rows": 64, "min_rows": 16, "tile_bytes": 16384, "share_keys": 128, "programs": 264, "merged_rows": 4,
        "merged_parts": 16, "num_warps": 4, "num_stages": 3}  # fmt: skip
TUNING = {
    "default": _ROW,
    "gfx942": _ROW | {"num_stages": 2},
    # keys of 8 bits cost instructions rather than memory: fewer warps for a tile, and more tiles at a time
    "sm_90": _ROW | {"share_keys": 64, "programs": 132, "num_stages": 4, "float8": {"programs": 396, "num_warps": 2}},
}


def contract(values: dict) -> Output:
    """Checks the arguments of `gqa_decode` and describes its outputs."""
    args = check.Arguments("gqa_decode", values)
    query = args.tensor("query", ("B", "Hq", "D"), check.FLOAT, contiguous=2)
    paging.check_row_strides(args, "query", query, 1)
    batch_size, num_heads, head_dim = args.size("B"), args.size("Hq"), args.size("D")
    paged_cache.check_cache(args, query.dtype, "B")
    paged_cache.check_logits(args)
    return Output(args.spec((batch_size, num_heads, head_dim), query.dtype),
                  args.spec((batch_size, num_heads), torch.float32))  # fmt: skip


@launcher
def gqa_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    deterministic: bool = False,
    out: Output | None = None,
) -> Output:
    """Attends one query token per request to its cached keys; shapes and layouts are in the module's docstring.

    The page table is either block_table with seq_lens, or kv_indptr with kv_indices and last_page_len.
    sm_scale: factor of the logits, by default 1 / sqrt(D).
    deterministic: a row's bits do not depend on the batch around it; takes longer.
    """
    values = locals()
    contracted = contract(values)
    out = check.allocate("gqa_decode", contracted, out)
    device = query.device
    launch_attention(
        "gqa_decode",
        values,
        out,
        tuned=tuning.row(TUNING, device),
        num_query=1,
        # the newest token is a draft block of one, as it is for the root of a tree
        num_drafts=1 if deterministic else 0,
        drafts="counted" if deterministic else "",
    )
    return out
