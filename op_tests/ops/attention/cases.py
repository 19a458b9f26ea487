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


def make_decode(head_dim, group_size, num_kv_heads, page_size, dtype, lengths, *, device="cpu", **cache):
    """Arguments of gqa_decode."""
    query = torch.randn(len(lengths), group_size * num_kv_heads, head_dim).to(device, dtype)
    return {"query": query} | paged_cache(lengths, page_size, num_kv_heads, head_dim, dtype, device=device, **cache)


def make_prompts(counts, before, head_dim, group_size, num_kv_heads, page_size, dtype, *, form="block_table",
                 device="cpu", is_strided=False):  # fmt: skip
    """Arguments of prefill_attention; without a page size keys are in rows."""
    lengths = [count + earlier for count, earlier in zip(counts, before)]
    heads = group_size * num_kv_heads
    bounds = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    values = {"query": torch.randn(sum(counts), heads, head_dim).to(device, dtype), "qo_indptr": bounds}
    values["max_query"] = max([1, *counts])
    if page_size is not None:
        return values | paged_cache(lengths, page_size, num_kv_heads, head_dim, dtype, form=form, device=device,
                                    is_strided=is_strided)  # fmt: skip
    both = torch.randn(sum(lengths), 2, num_kv_heads, head_dim).to(device, dtype)
    values |= {"key": both[:, 0], "value": both[:, 1]}
    if not is_strided:
        values |= {name: values[name].contiguous() for name in ("key", "value")}
    if any(before):
        values["key_indptr"] = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return values


def pack(visible: torch.Tensor, num_words: int) -> torch.Tensor:
    """bool [..., keys] -> int64 words [..., num_words]."""
    bits = torch.zeros(*visible.shape[:-1], num_words * 64, dtype=torch.int64)
    bits[..., : visible.shape[-1]] = visible
    # bits are distinct, so the sum is their union
    return (bits.unflatten(-1, (num_words, 64)) << torch.arange(64)).sum(-1)


def make_tree(num_query, num_keys, head_dim, group_size, num_kv_heads, page_size, dtype, prefixes, *, kind="random",
         is_separate=False, num_words=None, device="cpu", **cache):  # fmt: skip
    """Arguments of tree_attention."""
    batch_size = len(prefixes)
    if kind == "chain":
        visible = torch.ones(batch_size, num_query, num_keys, dtype=torch.bool).tril(num_keys - num_query)
    else:
        visible = torch.rand(batch_size, num_query, num_keys) < 0.4
    num_words = num_words if num_words is not None else -(-num_keys // 64)
    values = {
        "query": torch.randn(batch_size, num_query, group_size * num_kv_heads, head_dim).to(device, dtype),
        "tree_mask": pack(visible, num_words).to(device),
        "num_draft_keys": num_keys,
    }
    if is_separate:
        for name in ("draft_key", "draft_value"):
            values[name] = torch.randn(batch_size, num_keys, num_kv_heads, head_dim).to(device, dtype)
    filled = [prefix + (0 if is_separate else num_keys) for prefix in prefixes]
    paged = paged_cache(filled, page_size, num_kv_heads, head_dim, dtype, device=device, **cache)
    if "seq_lens" in paged:
        paged["seq_lens"] = torch.tensor(prefixes, dtype=paged["seq_lens"].dtype, device=device)
    return values | paged


def make_ragged(counts, head_dim, group_size, num_kv_heads, page_size, dtype, prefixes, *, form="block_table",
           is_separate=False, is_causal=False, device="cpu"):  # fmt: skip
    """Requests of `counts` rows each, one after another."""
    total, num_words = sum(counts), -(-max(counts, default=1) // 64)
    values = {"query": torch.randn(total, group_size * num_kv_heads, head_dim).to(device, dtype)}
    bounds = torch.tensor([0, *counts]).cumsum(0)
    values |= {"qo_indptr": bounds.to(device, torch.int32), "max_query": max(counts)}
    if is_causal:
        values["is_causal"] = True
    else:
        values["tree_mask"] = pack(torch.rand(total, max(counts)) < 0.4, num_words).to(device)
    if is_separate:
        for name in ("draft_key", "draft_value"):
            values[name] = torch.randn(total, num_kv_heads, head_dim).to(device, dtype)
    filled = [prefix + (0 if is_separate else count) for prefix, count in zip(prefixes, counts)]
    paged = paged_cache(filled, page_size, num_kv_heads, head_dim, dtype, form=form, device=device)
    if "seq_lens" in paged:
        paged["seq_lens"] = torch.tensor(prefixes, dtype=torch.int32, device=device)
    return values | paged


def along_its_path(values, request, row, form):
    """The arguments of gqa_decode for one row: the prefix and the drafts that it sees, side by side in new pages."""
    page_size, index = values["k_cache"].shape[1], torch.arange(values["num_draft_keys"])
    words = values["tree_mask"][request, row].cpu()
    visible = index[(words[index // 64] >> index % 64) & 1 == 1]
    if form == "csr":
        first, stop = values["kv_indptr"][request : request + 2].tolist()
        pages = values["kv_indices"][first:stop].cpu()
        prefix = (len(pages) - 1) * page_size + int(values["last_page_len"][request]) - values["num_draft_keys"]
    else:
        pages, prefix = values["block_table"][request].cpu(), int(values["seq_lens"][request])
    slots = torch.cat([torch.arange(prefix), prefix + visible])
    plain = {name: values[name] for name in ("sinks", "soft_cap", "window", "k_scale", "v_scale") if name in values}
    num_pages = -(-len(slots) // page_size) + 1
    for name in ("k_cache", "v_cache"):
        cache = values[name]
        raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        place = torch.arange(len(slots))
        filled = raw.new_zeros(num_pages, *raw.shape[1:])
        filled[place // page_size, place % page_size] = raw[pages[slots // page_size].long(), slots % page_size]
        plain[name] = filled.view(cache.dtype)
    device = plain["k_cache"].device
    plain["block_table"] = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    plain["seq_lens"] = torch.tensor([len(slots)], dtype=torch.int32, device=device)
    return values["query"][request : request + 1, row].contiguous(), plain, len(slots) - 1
