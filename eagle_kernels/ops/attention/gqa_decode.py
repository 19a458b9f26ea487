"""Attention of one query token per request over a paged KV cache: Flash-Decoding with grouped query heads.

Computes
    softmax(sm_scale * query . key) . value per request and query head. The keys of the batch are cut into even chunks,
    one for each program that runs at once (shared/chunks.py). A request's part of a chunk is attended with an online
    softmax, and partial results merge by their log-sum-exp.
Invariants
    Slots past the end or before the window are not read. NaN in a query or in a seen key stays in its request and KV
    head; where heads of 16, 32 or 64 elements are read as one (shared/split_attention.py), in those heads.
    Bits depend on how keys are cut, so on the lengths of the batch, or its plan. A plan of other lengths loses no key,
    and none, whatever it holds, leads out of the tensors. deterministic: bits depend on the request's own query, keys
    and length alone; they are those of a tree's node in tree_attention, whose draft block is in the pool.
Grid
    (Hkv * row tiles, chunks), one program attends the heads of a group to a chunk; heads that are read as one count as
    one. deterministic: (.., shares), one program attends them to a share (shared/ordered.py); past 65535, shares take
    two axes.
    Merge: (B, programs, column tiles), one program merges some columns of every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one part
Traffic
    2 * element bytes * Hkv * D per key, 2 * element bytes * B * Hq * D, and for the partial results of requests with
    more than one part 2 * 4 B * parts * Hq * (D + 1)
"""

from __future__ import annotations

import torch

from ...primitives import paging
from ...runtime import check, tuning
from ...runtime.launch import launcher
from .shared import paged_cache
from .shared.attention import Output
from .shared.split_attention import launch_attention

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/attention.txt
# See `split_attention`; deterministic calls use `ordered.TUNING` instead. gfx942 has 64 KiB of shared memory.
_ROW = {"max_rows": 64, "min_rows": 16, "tile_bytes": 16384, "share_keys": 128, "programs": (1, 2), "num_warps": 4,
        "num_stages": 3, "widest": {"max_rows": 32, "num_warps": 4, "num_stages": 2}}  # fmt: skip
# keys of 8 bits cost instructions rather than memory: fewer warps for a tile, and more tiles at a time
_HOPPER = {"share_keys": 64, "num_stages": 4,
           "wide": {"above": 192, "tile_bytes": 32768, "programs": (1, 1), "num_stages": 3},
           "float8": {"tile_bytes": 8192, "programs": (4, 4), "num_warps": 2},
           "widest": {"max_rows": 32, "tile_bytes": 32768, "programs": (1, 1), "num_warps": 8,
                      "num_stages": 3}}  # fmt: skip
_SMALL = _ROW | {"num_stages": 2, "widest": {"max_rows": 32, "num_stages": 1}}
TUNING = {"default": _ROW, "gfx942": _SMALL, "sm_90": _ROW | _HOPPER}


def contract(values: dict) -> Output:
    """Checks the arguments of `gqa_decode` and describes its outputs."""
    args = check.Arguments("gqa_decode", values)
    query = args.tensor("query", ("B", "Hq", "D"), check.FLOAT, contiguous=2)
    paging.check_row_strides(args, "query", query, 1)
    batch_size, num_heads, head_dim = args.size("B"), args.size("Hq"), args.size("D")
    paged_cache.check_cache(args, query.dtype, "B")
    paged_cache.check_logits(args)
    paged_cache.check_plan(args, batch_size)
    paged_cache.debug_cache(args, lambda filled: (paged_cache.first_seen(filled - 1, values["window"]), filled))
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
    plan: torch.Tensor | None = None,
    out: Output | None = None,
) -> Output:
    """Attends one query token per request to the keys in its pages of the KV cache.

    Symbols: B requests, Hq query heads, a multiple of the Hkv KV heads, of D = 4..512 elements. Slot t of a request is
    in its page t // page_size; the last one holds the query's own key.

    Args:
        query: [B, Hq, D] fp16, bf16 or fp32. Rows may be strided.
        k_cache, v_cache: [num_pages, page_size, Hkv, D], dtype of `query`, or float8_e4m3fn, float8_e4m3fnuz or int8
            if `query` is 16-bit. page_size: a power of two, 1..256. Pages, slots and heads may be strided by multiples
            of D, slots and heads of both caches alike: as parts of one tensor, or heads outside of slots.
        block_table, seq_lens: None, or [B, max_pages] and [B] int. A page table as in vLLM: page ids (rows may be
            strided, and -1 throughout pads the batch) and number of keys of each request.
        kv_indptr, kv_indices, last_page_len: None, or [B + 1], [*] and [B] int. A CSR one, as in FlashInfer and SGLang:
            request b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]], the last with last_page_len[b] keys.
        sinks: None or [Hq] fp16, bf16 or fp32. An extra logit per head, without a value.
        k_scale, v_scale: None, or [1] or [Hkv] fp32. Factors of cached keys and values, at least 0; both or neither.
        sm_scale: factor of the logits, above 0. None: 1 / sqrt(D).
        soft_cap: above 0; makes logits soft_cap * tanh(logits / soft_cap). None: off.
        window: how many of the last keys are seen, at least 1. None: all.
        deterministic: a request's bits do not depend on the batch around it. Takes longer.
        plan: None or [B + 1] int32. From `plan_attention`, with the same lengths and window. Not used if deterministic.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [B, Hq, D], dtype of `query`. The values, weighted by the softmax of the logits.
        lse: [B, Hq] fp32. Log of the sum of exp(logits), sink included.
        A request without keys has output 0 and lse -inf (or its sink).

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: `kv_indptr`, lengths (0 to what the pages hold), and
        ids of seen pages; nothing outside the pool is read.

    Source:
        Flash-Decoding, on the online softmax of https://arxiv.org/abs/1805.02867; sinks as in gpt-oss.

    Example:
        >>> v_cache = torch.arange(4.0).repeat_interleave(4).view(4, 1, 1, 4)  # four pages of one slot
        >>> result = eagle_kernels.gqa_decode(torch.zeros(1, 1, 4), torch.zeros(4, 1, 1, 4), v_cache,
        ...     block_table=torch.tensor([[3, 0]]), seq_lens=torch.tensor([2]))
        >>> result.output.flatten().tolist()  # the mean of 3 and 0
        [1.5, 1.5, 1.5, 1.5]
    """
    values = locals()
    out = check.allocate("gqa_decode", contract(values), out)
    launch_attention(
        "gqa_decode",
        values,
        out,
        tuned=tuning.row(TUNING, query.device),
        num_query=1,
        # the newest token is a draft block of one, as it is for the root of a tree
        num_drafts=1 if deterministic else 0,
        drafts="counted" if deterministic else "",
    )
    return out
