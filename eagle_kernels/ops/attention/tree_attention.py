"""Attention of a block of draft tokens over a paged prefix, which all see, and over the draft block, under a tree mask.

Computes
    output = softmax(sm_scale * query . key) . value per request, query row and head, over every prefix slot
    0..prefix - 1 and the draft keys whose bit is set in the row's mask; lse = log of the sum of exp(sm_scale * query .
    key). Tree attention (SpecInfer, arXiv 2305.09781) on Flash-Decoding: the prefix is split over programs and needs no
    mask, the last split also handles the draft block, and the partial results merge by their log-sum-exp.
Shapes
    query          [B, Nq, Hq, D]                  float  Nq in 1..256; D in 16..256; Hq a multiple of Hkv;
                                                          the axes B and Nq may be strided
    k_cache        [num_pages, page_size, Hkv, D]  as query; page_size a power of two in 1..256; pages may be strided
    v_cache        as k_cache
    tree_mask      [B, Nq, W]                      int64  bit j % 64 of word j // 64: the row sees draft key j;
                                                          W >= ceil(Nk / 64), bits from Nk on are ignored
    num_draft_keys int                                    Nk in 1..512
    draft_key      [B, Nk, Hkv, D]                 as query; the draft block's keys, B and Nk may be strided; without
                                                          it they are in the pool, at the slots prefix..prefix + Nk - 1
    draft_value    as draft_key
    block_table    [B, max_pages]                  int    page ids, with
    seq_lens       [B]                             int    prefix
    kv_indptr      [B + 1]                         int    or: where a request's page ids start, with
    kv_indices     [*]                             int    page ids, and
    last_page_len  [B]                             int    filled slots of the last page; all filled slots,
                                                          (pages - 1) * page_size + last_page_len, are the prefix, and
                                                          without draft_key the draft block
    -> output      [B, Nq, Hq, D]                  as query
    -> lse         [B, Nq, Hq]                     fp32, natural logarithm
Invariants
    A row that sees no key has output 0 and lse -inf. Slots past the end, past the table, or on a page outside the pool,
    and draft keys that no row of the tile sees, are not read and do not count. NaN in a query or in a visible key stays
    in its request and KV head.
    A row's bits depend on its own request, on the number of splits, and on nothing else in the batch; the number of
    splits follows from the shapes (B and the capacity of the page table among them), the dtype and the tuning row.
Grid
    (B, Hkv * row tiles, splits), one program attends a tile of (token, head of the group) rows of one KV head to one
    share of the keys; merge: (B * Nq * Hq,), one program writes one row.
Launches
    2
Traffic
    2 * element bytes * Hkv * D per slot and draft key, 2 * element bytes * B * Nq * Hq * D, 8 B per mask word, and for
    the partial results 2 * 4 B * splits * B * Nq * Hq * (D + 1).
"""

from __future__ import annotations

import torch

from ...primitives import paging, softmax
from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import attend_split, find_pages, load_paged, request_pages
from ...primitives.softmax import attend, finish_rows, start_rows
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import is_interpreting, launch, launcher
from .gqa_decode import LIMITS, TUNING, Output, merge_partials

MAX_QUERY = 256
MAX_DRAFT_KEYS = 512


@triton.jit(
    do_not_specialize=["stride_query_batch", "stride_query_token", "stride_draft_key_batch", "stride_draft_key_token",
                       "stride_draft_value_batch", "stride_draft_value_token", "stride_k_page", "stride_v_page",
                       "stride_page_table_request", "table_size", "num_pages", "num_query", "num_draft_keys",
                       "num_words"]
)  # fmt: skip
def _tree_attention_kernel(
    # inputs
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tree_mask_ptr,
    draft_key_ptr,
    draft_value_ptr,
    page_table_ptr,
    page_indptr_ptr,
    lengths_ptr,
    # outputs
    partial_output_ptr,
    partial_lse_ptr,
    # sizes
    scale,
    stride_query_batch,
    stride_query_token,
    stride_draft_key_batch,
    stride_draft_key_token,
    stride_draft_value_batch,
    stride_draft_value_token,
    stride_k_page,
    stride_v_page,
    stride_page_table_request,
    table_size,
    num_pages,
    num_query,
    num_draft_keys,
    num_words,
    GROUP_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CSR: tl.constexpr,
    IS_DRAFT_IN_POOL: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    row_tile = tl.program_id(1) // NUM_KV_HEADS
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < HEAD_DIM)[None, :]
    row = row_tile * BLOCK_ROW + tl.arange(0, BLOCK_ROW)  # (token, head of the group), the head fastest
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = token < num_query
    in_bounds = is_row[:, None] & is_column
    query_row = request * stride_query_batch + token.to(tl.int64) * stride_query_token + head
    query = tl.load(query_ptr + query_row[:, None] * HEAD_DIM + column[None, :], mask=in_bounds, other=0.0)

    first_page, page_count, filled = request_pages(
        request, page_indptr_ptr, lengths_ptr, stride_page_table_request, table_size, PAGE_SIZE, IS_CSR
    )
    if IS_CSR and IS_DRAFT_IN_POOL:
        prefix = tl.maximum(filled - num_draft_keys, 0)
        slots_end = filled
    else:
        prefix = filled
        slots_end = page_count * PAGE_SIZE

    row_max, row_sum, accumulator = start_rows(BLOCK_ROW, BLOCK_DIM)
    row_max, row_sum, accumulator = attend_split(
        query, k_cache_ptr, v_cache_ptr, page_table_ptr, first_page, page_count, num_pages, stride_k_page,
        stride_v_page, kv_head, prefix, split, num_splits, scale, row_max, row_sum, accumulator, SPLIT_KEYS,
        PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, IS_WIDENED, BLOCK_KEY, BLOCK_DIM,
    )  # fmt: skip

    # the draft block, in the last split only; BLOCK_KEY divides 64, so one mask word covers a tile of keys
    mask_row = (request * num_query + token) * num_words
    for start in range(0, tl.where(split == num_splits - 1, num_draft_keys, 0), BLOCK_KEY):
        draft = start + tl.arange(0, BLOCK_KEY)
        word = tl.load(tree_mask_ptr + mask_row + start // 64, mask=is_row, other=0)
        is_visible = ((word[:, None] >> (draft & 63).to(tl.int64)[None, :]) & 1) != 0
        is_visible &= (draft < num_draft_keys)[None, :]
        is_seen = tl.max(is_visible.to(tl.int32), axis=0) != 0
        if IS_DRAFT_IN_POOL:
            slot = prefix + draft
            page, exists = find_pages(
                page_table_ptr, first_page, page_count, num_pages, slot, is_seen & (slot < slots_end), PAGE_SIZE
            )
            key = load_paged(
                k_cache_ptr, page, slot, exists, kv_head, stride_k_page, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM
            )
            value = load_paged(
                v_cache_ptr, page, slot, exists, kv_head, stride_v_page, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM
            )
            is_visible &= exists[None, :]
        else:
            is_read = is_seen[:, None] & is_column
            wide = draft.to(tl.int64)
            key_row = request * stride_draft_key_batch + wide * stride_draft_key_token + kv_head
            value_row = request * stride_draft_value_batch + wide * stride_draft_value_token + kv_head
            key = tl.load(draft_key_ptr + key_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0)
            value = tl.load(draft_value_ptr + value_row[:, None] * HEAD_DIM + column[None, :], mask=is_read, other=0.0)
        row_max, row_sum, accumulator = attend(
            query, key, value, is_visible, scale, row_max, row_sum, accumulator, IS_WIDENED
        )

    output, lse = finish_rows(row_max, row_sum, accumulator)
    output_row = (request * num_query + token) * (NUM_KV_HEADS * GROUP_SIZE) + head
    place = output_row * num_splits + split
    tl.store(partial_lse_ptr + place, lse, mask=is_row)
    is_written = in_bounds & (lse != float("-inf"))[:, None]
    tl.store(partial_output_ptr + place[:, None] * HEAD_DIM + column[None, :], output, mask=is_written)


def contract(values: dict) -> Output:
    """Checks the arguments of `tree_attention` and describes its outputs."""
    args = check.Arguments("tree_attention", values)
    num_draft_keys = args.integer("num_draft_keys", 1, MAX_DRAFT_KEYS)
    query = args.tensor("query", ("B", "Nq", "Hq", "D"), check.FLOAT, contiguous=2)
    paging.check_row_strides(args, "query", query, 2)
    shape = tuple(query.shape)
    if not 1 <= args.size("Nq") <= MAX_QUERY:
        args.fail("query", f"have Nq in 1..{MAX_QUERY}", args.size("Nq"))
    paging.check_cache(args, query.dtype)
    tree_mask = args.tensor("tree_mask", ("B", "Nq", None), (torch.int64,))
    if tree_mask.shape[2] * 64 < num_draft_keys:
        args.fail("tree_mask", f"hold a bit for each of {num_draft_keys} draft keys", f"{tree_mask.shape[2]} words")
    if (values["draft_key"] is None) != (values["draft_value"] is None):
        missing, given = ("draft_key", "draft_value")[:: 1 if values["draft_key"] is None else -1]
        args.fail(missing, f"be given with {given}", None)
    for name in ("draft_key", "draft_value"):
        draft = args.tensor(name, ("B", num_draft_keys, "Hkv", "D"), (query.dtype,), optional=True, contiguous=2)
        if draft is not None:
            paging.check_row_strides(args, name, draft, 2)
    return Output(args.spec(shape, query.dtype), args.spec(shape[:3], torch.float32))


@launcher
def tree_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tree_mask: torch.Tensor,
    *,
    num_draft_keys: int,
    draft_key: torch.Tensor | None = None,
    draft_value: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    sm_scale: float | None = None,
    out: Output | None = None,
) -> Output:
    """Attends draft tokens to their prefix and their ancestors; shapes and layouts are in the module's docstring.

    num_draft_keys: Nk, keys of the draft block: the tree's nodes, or the beams of all levels drafted so far.
    draft_key, draft_value: the draft block; without them it is read from the pool, behind the prefix.
    The page table is either block_table with seq_lens, or kv_indptr with kv_indices and last_page_len.
    sm_scale: factor of the logits, by default 1 / sqrt(D).
    """
    contracted = contract(locals())
    out = check.allocate("tree_attention", contracted, out)
    batch_size, num_query, num_heads, head_dim = query.shape
    device = query.device
    limits = tuning.row(LIMITS, device)
    cache = paging.cache_arguments(k_cache, v_cache, block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    num_kv_heads = cache["NUM_KV_HEADS"]
    group_size = num_heads // num_kv_heads
    tiles = softmax.tile_sizes(num_query * group_size, head_dim, query.element_size(), limits)
    num_tiles = num_kv_heads * -(-num_query * group_size // tiles["BLOCK_ROW"])
    num_splits = softmax.split_count(batch_size * num_tiles, paging.max_keys(cache, batch_size), limits)
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    partial_shape = (batch_size, num_query, num_heads, num_splits)
    partial_output = torch.empty((*partial_shape, head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=device)
    is_draft_in_pool = draft_key is None
    launch(
        "tree_attention",
        _tree_attention_kernel,
        (batch_size, num_tiles, num_splits),
        query_ptr=query,
        tree_mask_ptr=tree_mask,
        draft_key_ptr=draft_key,
        draft_value_ptr=draft_value,
        partial_output_ptr=partial_output,
        partial_lse_ptr=partial_lse,
        scale=scale * softmax.LOG2_E,
        stride_query_batch=query.stride(0) // head_dim,
        stride_query_token=query.stride(1) // head_dim,
        stride_draft_key_batch=0 if is_draft_in_pool else draft_key.stride(0) // head_dim,
        stride_draft_key_token=0 if is_draft_in_pool else draft_key.stride(1) // head_dim,
        stride_draft_value_batch=0 if is_draft_in_pool else draft_value.stride(0) // head_dim,
        stride_draft_value_token=0 if is_draft_in_pool else draft_value.stride(1) // head_dim,
        num_query=num_query,
        num_draft_keys=num_draft_keys,
        num_words=tree_mask.shape[2],
        GROUP_SIZE=group_size,
        SPLIT_KEYS=limits["split_keys"],
        IS_DRAFT_IN_POOL=is_draft_in_pool,
        IS_WIDENED=is_interpreting() and query.dtype == torch.bfloat16,
        **cache,
        **tiles,
        **tuning.row(TUNING, device),
    )
    merge_partials("tree_attention", partial_output, partial_lse, out)
    return out
