"""The paged KV cache: what a page table is, and reading through it.

k_cache and v_cache are [num_pages, page_size, Hkv, D]. Slot t of a request lies in its (t // page_size)-th page. The
page table comes in one of two forms, which differ only in where a request's page ids start and how its length is told:

    block_table [B, max_pages], seq_lens [B]                          vLLM
    kv_indptr [B + 1], kv_indices [*], last_page_len [B]              FlashInfer, SGLang

Page ids outside 0..num_pages - 1 and slots outside the table are never dereferenced: those keys do not exist.
"""

from __future__ import annotations

import torch

from ..runtime import check
from ..runtime.language import tl, triton
from .softmax import attend

MAX_PAGE_SIZE = 256
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@triton.jit
def request_pages(
    request,
    page_indptr_ptr,
    lengths_ptr,
    stride_page_table_request,
    table_size,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
):
    """(where the page ids of `request` start, how many there are, how many slots are filled)."""
    length = tl.load(lengths_ptr + request).to(tl.int64)
    if IS_CSR:
        first = tl.load(page_indptr_ptr + request).to(tl.int64)
        last = tl.load(page_indptr_ptr + request + 1).to(tl.int64)
        first = tl.minimum(tl.maximum(first, 0), table_size)
        count = tl.maximum(tl.minimum(last, table_size) - first, 0)
        length += (count - 1) * PAGE_SIZE
    else:
        first = request * stride_page_table_request
        count = tl.zeros([], tl.int64) + table_size
    length = tl.maximum(tl.minimum(length, count * PAGE_SIZE), 0)
    return first, count.to(tl.int32), length.to(tl.int32)


@triton.jit
def find_pages(page_table_ptr, first_page, page_count, num_pages, slot, is_wanted, PAGE_SIZE: tl.constexpr):
    """(page ids int64, whether the slots exist) for a vector of slots."""
    index = slot // PAGE_SIZE
    is_wanted = is_wanted & (slot >= 0) & (index < page_count)
    page = tl.load(page_table_ptr + first_page + index, mask=is_wanted, other=-1).to(tl.int64)
    return page, is_wanted & (page >= 0) & (page < num_pages)


@triton.jit
def load_paged(
    cache_ptr,
    page,
    slot,
    exists,
    kv_head,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The rows [KEY, BLOCK_DIM] of these slots, 0 where they do not exist; stride_page counts rows of HEAD_DIM."""
    column = tl.arange(0, BLOCK_DIM)
    row = page * stride_page + (slot % PAGE_SIZE) * NUM_KV_HEADS + kv_head
    return tl.load(
        cache_ptr + row[:, None] * HEAD_DIM + column[None, :],
        mask=exists[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def attend_split(
    query,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    first_page,
    page_count,
    num_pages,
    stride_k_page,
    stride_v_page,
    kv_head,
    length,
    split,
    num_splits,
    scale,
    row_max,
    row_sum,
    accumulator,
    SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """All rows attend to this split's share of the slots 0..length - 1; a share is a multiple of SPLIT_KEYS slots."""
    share = tl.cdiv(tl.cdiv(length, num_splits), SPLIT_KEYS) * SPLIT_KEYS
    begin = tl.minimum(split * share, length)
    end = tl.minimum(begin + share, length)
    for start in range(begin, end, BLOCK_KEY):
        slot = start + tl.arange(0, BLOCK_KEY)
        page, exists = find_pages(page_table_ptr, first_page, page_count, num_pages, slot, slot < end, PAGE_SIZE)
        key = load_paged(
            k_cache_ptr, page, slot, exists, kv_head, stride_k_page, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM
        )
        value = load_paged(
            v_cache_ptr, page, slot, exists, kv_head, stride_v_page, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM
        )
        row_max, row_sum, accumulator = attend(
            query, key, value, exists[None, :], scale, row_max, row_sum, accumulator, IS_WIDENED
        )
    return row_max, row_sum, accumulator


def check_cache(args: check.Arguments, dtype: torch.dtype) -> None:
    """Checks k_cache and v_cache against the query's axes B, Hq and D, and the page table in either form."""
    values = args.values
    if not MIN_HEAD_DIM <= args.size("D") <= MAX_HEAD_DIM:
        args.fail("query", f"have D in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}", args.size("D"))
    for name in ("k_cache", "v_cache"):
        cache = args.tensor(name, ("num_pages", "page_size", "Hkv", "D"), (dtype,), contiguous=3)
        check_row_strides(args, name, cache, 1)
    page_size = args.size("page_size")
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        args.fail("k_cache", f"have a page size that is a power of two in 1..{MAX_PAGE_SIZE}", page_size)
    num_heads, num_kv_heads = args.size("Hq"), args.size("Hkv")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        args.fail("query", f"have Hq that is a multiple of Hkv = {num_kv_heads}", num_heads)
    form = args.exactly_one("block_table", "kv_indptr")
    if form == "block_table":
        args.tensor("block_table", ("B", "max_pages"), check.INTEGER, contiguous=1)
        args.tensor("seq_lens", ("B",), check.INTEGER)
        excluded = ("kv_indices", "last_page_len")
    else:
        args.tensor("kv_indptr", (args.size("B") + 1,), check.INTEGER)
        args.tensor("kv_indices", (None,), check.INTEGER)
        args.tensor("last_page_len", ("B",), check.INTEGER)
        excluded = ("seq_lens",)
    for name in excluded:
        if values[name] is not None:
            args.fail(name, f"not be given with {form}, the other form of a page table", "a tensor")


def check_row_strides(args: check.Arguments, name: str, value: torch.Tensor, leading: int) -> None:
    """The `leading` axes step over whole rows of D elements: kernels then know that rows are aligned."""
    head_dim = value.shape[-1]
    for axis in range(leading):
        if value.shape[axis] > 1 and value.stride(axis) % head_dim:
            args.fail(name, f"have strides that are multiples of D = {head_dim}", list(value.stride()))


def cache_arguments(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
) -> dict:
    """The launch arguments that describe a checked cache and its page table."""
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    is_csr = kv_indptr is not None
    return {
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "page_table_ptr": kv_indices if is_csr else block_table,
        "page_indptr_ptr": kv_indptr,
        "lengths_ptr": last_page_len if is_csr else seq_lens,
        "stride_k_page": k_cache.stride(0) // head_dim,
        "stride_v_page": v_cache.stride(0) // head_dim,
        "stride_page_table_request": 0 if is_csr else block_table.stride(0),
        "table_size": kv_indices.shape[0] if is_csr else block_table.shape[1],
        "num_pages": num_pages,
        "PAGE_SIZE": page_size,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "IS_CSR": is_csr,
    }


def max_keys(cache: dict, batch_size: int) -> int:
    """How many slots a request can have (CSR: has on average), from the sizes in `cache_arguments`."""
    pages = -(-cache["table_size"] // max(batch_size, 1)) if cache["IS_CSR"] else cache["table_size"]
    return pages * cache["PAGE_SIZE"]
