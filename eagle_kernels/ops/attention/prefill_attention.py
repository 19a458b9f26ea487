"""Causal attention of whole prompts, or of chunks of them after what is cached already: a flash kernel.

Computes
    softmax(sm_scale * query . key) . value per query row and head. With n queries and m keys, query i of a request is
    at position m - n + i. A program keeps a tile of query rows and reads the keys once, tile by tile; only tiles on the
    diagonal and at the edge of a window are masked. On Hopper GPUs tensor descriptors read the tiles of long prompts
    that need no mask, where they can: 16-bit heads of 128 or 256 elements, no pages or pages of 64 slots or more.
Invariants
    Keys that no row of a tile sees are not read. Of a request of more than max_query queries the first max_query give
    what they give where all are attended. A row's bits depend on its own request and on max_query alone.
Grid
    (row tiles of all requests, Hkv), one program attends a tile of (token, head of the group) rows of one KV head. The
    host knows only how many tiles there are at most, one more than whole ones for each request; programs find theirs by
    qo_indptr, so that none is spent on what a request lacks to the longest. Of each request the last tiles, which see
    most keys, come first.
Launches
    1
Traffic
    element bytes * D * (2 * Hq * T + 2 * Hkv * keys): queries and output once, keys and values once (and again for
    every tile of rows, out of the cache)
"""

from __future__ import annotations

import torch

from ...primitives import paging
from ...runtime import check, tuning
from ...runtime.launch import launcher
from .shared import paged_cache
from .shared.attention import Output
from .shared.prompts import launch_prompts

# See `split_attention`. The first entry is taken whose from_rows rows for a KV head a request has: two
# tiles for all lengths, so that few variants are ever compiled.
_ROW = {"from_rows": 33, "min_rows": 128, "max_rows": 128, "tile_bytes": 16384, "num_warps": 8, "num_stages": 2,
        "widest": {"min_rows": 32, "max_rows": 32, "num_warps": 4}}  # fmt: skip
_FEW = {"from_rows": 0, "min_rows": 32, "max_rows": 32}
_AMD = _ROW | {"tile_bytes": 8192}  # with more, heads past 128 spill half a kB a thread
# of _ROW where tensor descriptors read the keys: two tiles side by side on a multiprocessor, or one of wide heads
_DESCRIBED = {
    "min_rows": 64, "max_rows": 64, "num_warps": 4, "num_stages": 2,
    "wide": {"above": 128, "min_rows": 128, "max_rows": 128, "tile_bytes": 32768, "num_warps": 8},
}  # fmt: skip
# a call with descriptors takes the host longer; where tiles of 128 columns wait for their pages, it pays later
DESCRIBED_TOKENS = 1024
PAGED_FACTOR = 5
_SMALL = _AMD | {"widest": _ROW["widest"] | {"num_stages": 1}}  # has 64 KiB of shared memory
# for prompts and chunks; for a few rows, as of a tree
TUNING = {
    "default": (_ROW, _ROW | _FEW),
    "sm_90": (_ROW | {"num_stages": 3, "described": _DESCRIBED}, _ROW | _FEW | {"num_stages": 3}),
    "gfx942": (_SMALL, _SMALL | _FEW),
    "gfx950": (_AMD, _AMD | _FEW),
}


def contract(values: dict) -> Output:
    """Checks the arguments of `prefill_attention` and describes its outputs."""
    args = check.Arguments("prefill_attention", values)
    query = args.tensor("query", ("T", "Hq", "D"), check.FLOAT, contiguous=2)
    paging.check_row_strides(args, "query", query, 1)
    args.integer("max_query", 1)
    batch_size = paged_cache.check_bounds(args, args.size("T"))
    if args.exactly_one("key", "k_cache") == "k_cache":
        paged_cache.check_cache(args, query.dtype, batch_size)
        extra = ("value", "key_indptr")
    else:
        paged_cache.check_head_dim(args)
        for name in ("key", "value"):
            rows = args.tensor(name, ("Tk", "Hkv", "D"), (query.dtype,), contiguous=2)
            paging.check_row_strides(args, name, rows, 1)
        paged_cache.check_group(args)
        args.tensor("key_indptr", (batch_size + 1,), check.INTEGER, optional=True)
        if values["key_indptr"] is None and args.size("Tk") != args.size("T"):
            args.fail("key_indptr", "be given where the numbers of keys and queries differ", None)
        extra = ("v_cache", "block_table", "seq_lens", "kv_indptr", "kv_indices", "last_page_len", "k_scale", "v_scale")
    for name in extra:
        if values[name] is not None:
            args.fail(name, f"not be given with {'key' if values['key'] is not None else 'k_cache'}", "a tensor")
    paged_cache.check_logits(args)
    if values["key"] is None:
        paged_cache.debug_cache(args, lambda filled: paged_cache.seen_by_prompts(values, filled))
    elif values["key_indptr"] is not None:
        paging.debug_bounds(args, "key_indptr", args.size("Tk"))
    return Output(args.spec(tuple(query.shape), query.dtype), args.spec(tuple(query.shape[:2]), torch.float32))


@launcher
def prefill_attention(
    query: torch.Tensor,
    qo_indptr: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    key_indptr: torch.Tensor | None = None,
    *,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query: int,
    is_causal: bool = True,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    out: Output | None = None,
) -> Output:
    """Attends prompts, or chunks of prompts, to themselves and to what comes before them.

    Symbols: B requests, T queries and Tk keys of all of them, Hq query heads, a multiple of the Hkv KV heads, of
    D = 4..512 elements. Keys are in `key` and `value`, or in a paged cache. A request's last keys are those of its
    queries.

    Args:
        query: [T, Hq, D] fp16, bf16 or fp32. The requests one after another. Rows may be strided.
        qo_indptr: [B + 1] int. Request b has the queries query[qo_indptr[b]:qo_indptr[b + 1]].
        key, value: None or [Tk, Hkv, D], dtype of `query`. Rows may be strided.
        key_indptr: None or [B + 1] int. The same for `key` and `value`. None: qo_indptr, which needs Tk = T.
        k_cache, v_cache: None or [num_pages, page_size, Hkv, D], dtype of `query`, or float8_e4m3fn, float8_e4m3fnuz or
            int8 if `query` is 16-bit. page_size: a power of two, 1..256. Pages, slots and heads may be strided by
            multiples of D, slots and heads of both caches alike: as parts of one tensor, or heads outside of slots.
        block_table, seq_lens: None, or [B, max_pages] and [B] int. A page table as in vLLM: page ids (rows may be
            strided, and -1 throughout pads the batch) and number of keys of each request.
        kv_indptr, kv_indices, last_page_len: None, or [B + 1], [*] and [B] int. A CSR one, as in FlashInfer and SGLang:
            request b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]], the last with last_page_len[b] keys.
        sinks: None or [Hq] fp16, bf16 or fp32. An extra logit per head, without a value.
        k_scale, v_scale: None, or [1] or [Hkv] fp32. Factors of cached keys and values, at least 0; both or neither.
        max_query: the most queries of a request, at least 1.
        is_causal: each query sees the keys up to its own. False: all keys of its request.
        sm_scale: factor of the logits, above 0. None: 1 / sqrt(D).
        soft_cap: above 0; makes logits soft_cap * tanh(logits / soft_cap). None: off.
        window: at least 1; a query at position p sees the keys at positions above p - window. None: all.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [T, Hq, D], dtype of `query`. The values, weighted by the softmax of the logits.
        lse: [T, Hq] fp32. Log of the sum of exp(logits), sink included.
        A row that sees no key (more queries than keys) has output 0 and lse -inf (or its sink). Rows of no request, and
        those past max_query of a request, are not written.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: each indptr, max_query, lengths (0 to what the pages
        hold), and ids of seen pages; nothing outside the pool is read.

    Source:
        FlashAttention, https://arxiv.org/abs/2205.14135 and https://arxiv.org/abs/2307.08691; sinks as in gpt-oss.

    Example:
        >>> value = torch.tensor([0.0, 2.0, 4.0]).repeat_interleave(4).view(3, 1, 4)
        >>> result = eagle_kernels.prefill_attention(
        ...     torch.zeros(3, 1, 4), torch.tensor([0, 3]), torch.zeros(3, 1, 4), value, max_query=3)
        >>> result.output[:, 0, 0].round(decimals=3).tolist()  # of 0; of 0, 2; of 0, 2, 4
        [0.0, 1.0, 2.0]
    """
    values = locals()
    out = check.allocate("prefill_attention", contract(values), out)
    keys = (k_cache, v_cache) if key is None else (key, value)
    page_size, num_kv_heads = k_cache.shape[1:3] if key is None else (0, key.shape[1])
    num_rows = max_query * (query.shape[1] // num_kv_heads)
    tuned = next(row for row in tuning.row(TUNING, query.device) if num_rows >= row["from_rows"])
    least = DESCRIBED_TOKENS * (PAGED_FACTOR if page_size > 0 and query.shape[-1] <= 128 else 1)
    is_described = "described" in tuned and max_query >= least and window is None
    is_described = is_described and all(_has_tiles(each, query.dtype, page_size) for each in keys)
    launch_prompts(
        "prefill_attention",
        values,
        out,
        keys=keys,
        tuned=tuned | tuned["described"] if is_described else tuned,
        is_described=is_described,
    )
    return out


def _has_tiles(keys: torch.Tensor, dtype: torch.dtype, page_size: int) -> bool:
    """Returns whether tensor descriptors can read tiles of keys [.., Hkv, D] with a row for each slot.

    page_size: 0 without pages.
    """
    is_dense = page_size == 0 or (page_size >= 64 and keys.stride(0) == page_size * keys.stride(1))
    is_aligned = keys.data_ptr() % 16 == 0 and keys.stride(-3) * keys.element_size() % 16 == 0
    # a head next to the other ones of its slot
    is_row = keys.shape[-2] == 1 or keys.stride(-2) * keys.shape[-2] <= keys.stride(-3)
    has_size = keys.shape[-1] in (128, 256) and keys.numel() > 0
    return has_size and keys.dtype == dtype and dtype != torch.float32 and is_dense and is_aligned and is_row
