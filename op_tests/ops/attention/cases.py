"""Paged caches for the attention tests, scattered pages in a pool that is NaN wherever nobody may read."""

import torch

from eagle_kernels.runtime import target


def paged_cache(
    lengths: list[int],
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    form: str = "block_table",
    max_pages: int | None = None,
    is_strided: bool = False,
    index_dtype: torch.dtype = torch.int32,
    device="cpu",
) -> dict:
    """k_cache, v_cache and a page table whose requests have `lengths` filled slots on randomly scattered pages.

    Entries of the block table past a request's pages are -1, slots past its end NaN. is_strided: the two caches are
    interleaved views of one pool, and the block table is a slice of a wider one.
    """
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    pool = torch.full((num_pages, 2, page_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    order = torch.randperm(num_pages)
    tables, first = [], 0
    for length, count in zip(lengths, counts):
        table = order[first : first + count]
        first += count
        for slot in range(0, length, page_size):
            filled = min(page_size, length - slot)
            pool[table[slot // page_size], :, :filled] = torch.randn(2, filled, num_kv_heads, head_dim).to(dtype)
        tables.append(table)
    pool = pool.to(device)
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    if not is_strided:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    values = {"k_cache": k_cache, "v_cache": v_cache}
    if form == "block_table":
        width = max_pages if max_pages is not None else max([1, *counts])
        block_table = torch.full((len(lengths), width + 3), -1, dtype=index_dtype)
        for request, table in enumerate(tables):
            block_table[request, : len(table)] = table
        block_table = block_table.to(device)[:, :width]
        return values | {
            "block_table": block_table if is_strided else block_table.contiguous(),
            "seq_lens": torch.tensor(lengths, dtype=index_dtype, device=device),
        }
    kv_indptr = torch.tensor([0, *counts], dtype=index_dtype).cumsum(0).to(index_dtype)
    last_page_len = [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts)]
    return values | {
        "kv_indptr": kv_indptr.to(device),
        "kv_indices": torch.cat([*tables, torch.full((5,), -1)]).to(device, index_dtype),
        "last_page_len": torch.tensor(last_page_len, dtype=index_dtype, device=device),
    }


def with_nan_beside(values: dict) -> dict:
    """The same keys and values, but the second KV head's are NaN, next to which those of the first one lie."""
    for name in ("k_cache", "v_cache"):
        values[name][:, :, 1] = float("nan")
    return values


def beyond_int32(values: dict) -> dict:
    """The same pages at the end of pools of more than 2^31 elements, with block tables that say so."""
    moved = dict(values)
    for name in ("k_cache", "v_cache"):
        pages = values[name]
        far = 2**31 // pages[0].numel() + 1
        moved[name] = pages.new_empty(far + len(pages), *pages.shape[1:])
        moved[name][far:] = pages
    moved["block_table"] = torch.where(values["block_table"] >= 0, values["block_table"] + far, -1)
    return moved


def fp8_of(device) -> torch.dtype:
    """The 8-bit float that kernels on this device know."""
    kinds = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return next(dtype for dtype in kinds if target.has_fp8(torch.device(device), dtype))


HEAD_DIMS = (8, 64, 80, 96, 112, 128, 192, 256, 320, 512)
EVERY_HEAD_DIM = (*range(4, 257, 2), 258, 386, 512)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
EIGHT_BITS = (*FLOAT8, torch.int8)


# cases named after a type of 8 bits, and the targets that do not know it
WITHOUT_FLOAT8 = {
    *((str(torch.float8_e4m3fn), target) for target in ("sm_80", "gfx942")),
    *((str(torch.float8_e4m3fnuz), target) for target in ("sm_80", "sm_90", "sm_100", "gfx950")),
}


def with_float8(values: dict, dtype: torch.dtype | None = None, k_scale=(1.0,), v_scale=(1.0,)) -> dict:
    """The same with 8-bit caches, of the float that this device knows unless given, and scales, of heads or of all."""
    device, dtype = values["k_cache"].device, dtype or fp8_of(values["k_cache"].device)
    finite = {name: values[name].nan_to_num() for name in ("k_cache", "v_cache")}
    steps = 30.0 if dtype == torch.int8 else 1.0  # of a scale
    if dtype == torch.int8:
        finite = {name: (cache * steps).round().clamp(-127, 127) for name, cache in finite.items()}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    scales = {name: torch.tensor(scale, device=device) / steps for name, scale in scales.items()}
    return values | {name: cache.to(dtype) for name, cache in finite.items()} | scales


def of_every_dtype_and_head_dim(make):
    """Ahead-of-time cases: `make(head_dim, dtype)` with a paged cache, for all head sizes and types of queries and
    caches."""
    for head_dim in HEAD_DIMS:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield f"{dtype} D={head_dim}", make(head_dim, dtype)
        for dtype in EIGHT_BITS:
            yield f"{dtype} D={head_dim}", with_float8(make(head_dim, torch.bfloat16), dtype)
