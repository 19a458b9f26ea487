"""Attention of one query token per request over a paged KV cache, with grouped query heads.

Computes
    output = softmax(sm_scale * query . key) . value per request and query head over the slots 0..length - 1;
    lse = log of the sum of exp(sm_scale * query . key). Flash-Decoding: the keys of a request are split over programs,
    each runs an online softmax, and the partial results merge by their log-sum-exp.
Shapes
    query          [B, Hq, D]                      float  D in 16..256; Hq a multiple of Hkv; rows may be strided
    k_cache        [num_pages, page_size, Hkv, D]  as query; page_size a power of two in 1..256; pages may be strided
    v_cache        as k_cache
    block_table    [B, max_pages]                  int    page ids, with
    seq_lens       [B]                             int    length
    kv_indptr      [B + 1]                         int    or: where a request's page ids start, with
    kv_indices     [*]                             int    page ids, and
    last_page_len  [B]                             int    filled slots of the last page;
                                                          length = (pages - 1) * page_size + last_page_len
    -> output      [B, Hq, D]                      as query
    -> lse         [B, Hq]                         fp32, natural logarithm
Invariants
    A request without keys has output 0 and lse -inf. Slots past the length, past the table, or on a page outside the
    pool are not read and do not count. NaN in a query or in a visible key stays in its request and KV head.
    A row's bits depend on its own request, on the number of splits, and on nothing else in the batch; the number of
    splits follows from the shapes (B and the capacity of the page table among them), the dtype and the tuning row.
Grid
    (B, Hkv * row tiles, splits), one program attends a tile of the query heads of one KV head to one share of the keys;
    merge: (B * Hq,), one program writes one row.
Launches
    2
Traffic
    2 * element bytes * Hkv * D per slot, 2 * element bytes * B * Hq * D, and for the partial results
    2 * 4 B * splits * B * Hq * (D + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives import paging, softmax
from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import attend_split, request_pages
from ...primitives.softmax import finish_rows, merge_splits, start_rows
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import is_interpreting, launch, launcher


class Output(NamedTuple):
    """What `gqa_decode` returns."""

    output: torch.Tensor
    lse: torch.Tensor


# limits of the tiles and of the number of splits, see primitives/softmax.py
LIMITS = {"default": {"max_rows": 64, "tile_bytes": 16384, "programs": 264, "split_keys": 128, "max_splits": 16}}
TUNING = {"default": {"num_warps": 4, "num_stages": 2}}
MERGE_TUNING = {"default": {"num_warps": 4}}


@triton.jit(
    do_not_specialize=["stride_query_batch", "stride_k_page", "stride_v_page", "stride_page_table_request",
                       "table_size", "num_pages"]
)  # fmt: skip
def _gqa_decode_kernel(
    # inputs
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    page_indptr_ptr,
    lengths_ptr,
    # outputs
    partial_output_ptr,
    partial_lse_ptr,
    # sizes
    scale,
    stride_query_batch,
    stride_k_page,
    stride_v_page,
    stride_page_table_request,
    table_size,
    num_pages,
    GROUP_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CSR: tl.constexpr,
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
    member = row_tile * BLOCK_ROW + tl.arange(0, BLOCK_ROW)  # which query head of the group
    is_row = member < GROUP_SIZE
    in_bounds = is_row[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP_SIZE + member
    query_row = request * stride_query_batch + head
    query = tl.load(query_ptr + query_row[:, None] * HEAD_DIM + column[None, :], mask=in_bounds, other=0.0)

    first_page, page_count, length = request_pages(
        request, page_indptr_ptr, lengths_ptr, stride_page_table_request, table_size, PAGE_SIZE, IS_CSR
    )
    row_max, row_sum, accumulator = start_rows(BLOCK_ROW, BLOCK_DIM)
    row_max, row_sum, accumulator = attend_split(
        query, k_cache_ptr, v_cache_ptr, page_table_ptr, first_page, page_count, num_pages, stride_k_page,
        stride_v_page, kv_head, length, split, num_splits, scale, row_max, row_sum, accumulator, SPLIT_KEYS,
        PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, IS_WIDENED, BLOCK_KEY, BLOCK_DIM,
    )  # fmt: skip

    output, lse = finish_rows(row_max, row_sum, accumulator)
    place = (request * (NUM_KV_HEADS * GROUP_SIZE) + head) * num_splits + split
    tl.store(partial_lse_ptr + place, lse, mask=is_row)
    is_written = in_bounds & (lse != float("-inf"))[:, None]
    tl.store(partial_output_ptr + place[:, None] * HEAD_DIM + column[None, :], output, mask=is_written)


@triton.jit(do_not_specialize=["num_splits"])
def _gqa_decode_merge_kernel(
    partial_output_ptr,
    partial_lse_ptr,
    output_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLIT: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    output, lse = merge_splits(partial_output_ptr, partial_lse_ptr, row, num_splits, HEAD_DIM, BLOCK_DIM, BLOCK_SPLIT)
    column = tl.arange(0, BLOCK_DIM)
    tl.store(output_ptr + row * HEAD_DIM + column, output.to(output_ptr.dtype.element_ty), mask=column < HEAD_DIM)
    tl.store(lse_ptr + row, lse)


def merge_partials(op: str, partial_output: torch.Tensor, partial_lse: torch.Tensor, out: Output) -> None:
    """Merges partial_output [..., splits, D] and partial_lse [..., splits] into `out`; also tree_attention's."""
    num_splits, head_dim = partial_output.shape[-2:]
    launch(
        op,
        _gqa_decode_merge_kernel,
        (out.lse.numel(),),
        partial_output_ptr=partial_output,
        partial_lse_ptr=partial_lse,
        output_ptr=out.output,
        lse_ptr=out.lse,
        num_splits=num_splits,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SPLIT=triton.next_power_of_2(tuning.row(LIMITS, out.output.device)["max_splits"]),
        **tuning.row(MERGE_TUNING, out.output.device),
    )


def contract(values: dict) -> Output:
    """Checks the arguments of `gqa_decode` and describes its outputs."""
    args = check.Arguments("gqa_decode", values)
    query = args.tensor("query", ("B", "Hq", "D"), check.FLOAT, contiguous=2)
    paging.check_row_strides(args, "query", query, 1)
    batch_size, num_heads, head_dim = args.size("B"), args.size("Hq"), args.size("D")
    paging.check_cache(args, query.dtype)
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
    sm_scale: float | None = None,
    out: Output | None = None,
) -> Output:
    """Attends one query token per request to its cached keys; shapes and layouts are in the module's docstring.

    The page table is either block_table with seq_lens, or kv_indptr with kv_indices and last_page_len.
    sm_scale: factor of the logits, by default 1 / sqrt(D).
    """
    contracted = contract(locals())
    out = check.allocate("gqa_decode", contracted, out)
    batch_size, num_heads, head_dim = query.shape
    device = query.device
    limits = tuning.row(LIMITS, device)
    cache = paging.cache_arguments(k_cache, v_cache, block_table, seq_lens, kv_indptr, kv_indices, last_page_len)
    num_kv_heads = cache["NUM_KV_HEADS"]
    group_size = num_heads // num_kv_heads
    tiles = softmax.tile_sizes(group_size, head_dim, query.element_size(), limits)
    num_tiles = num_kv_heads * -(-group_size // tiles["BLOCK_ROW"])
    num_splits = softmax.split_count(batch_size * num_tiles, paging.max_keys(cache, batch_size), limits)
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    partial_output = torch.empty((batch_size, num_heads, num_splits, head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty((batch_size, num_heads, num_splits), dtype=torch.float32, device=device)
    launch(
        "gqa_decode",
        _gqa_decode_kernel,
        (batch_size, num_tiles, num_splits),
        query_ptr=query,
        partial_output_ptr=partial_output,
        partial_lse_ptr=partial_lse,
        scale=scale * softmax.LOG2_E,
        stride_query_batch=query.stride(0) // head_dim,
        GROUP_SIZE=group_size,
        SPLIT_KEYS=limits["split_keys"],
        IS_WIDENED=is_interpreting() and query.dtype == torch.bfloat16,
        **cache,
        **tiles,
        **tuning.row(TUNING, device),
    )
    merge_partials("gqa_decode", partial_output, partial_lse, out)
    return out
