"""Paged KV caches and dense attention, one request at a time; what the references of the attention ops share."""

import torch


def page_tables(
    page_size: int, block_table: torch.Tensor | None, seq_lens: torch.Tensor | None, kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None, last_page_len: torch.Tensor | None,
) -> list[tuple[torch.Tensor, int]]:  # fmt: skip
    """Returns the page ids and the number of filled slots of each request, from either form of a page table."""
    if block_table is not None:
        tables, lengths = list(block_table), seq_lens.tolist()
    else:
        bounds = [min(max(bound, 0), len(kv_indices)) for bound in kv_indptr.tolist()]
        tables = [kv_indices[first : max(first, last)] for first, last in zip(bounds, bounds[1:])]
        lengths = [(len(table) - 1) * page_size + last for table, last in zip(tables, last_page_len.tolist())]
    return [(table, max(0, min(length, len(table) * page_size))) for table, length in zip(tables, lengths)]


def request_bounds(indptr: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of each request's rows among num_rows, never outside them."""
    bounds = [min(max(bound, 0), num_rows) for bound in indptr.tolist()]
    return [(first, max(first, last)) for first, last in zip(bounds, bounds[1:])]


def find_slots(table: torch.Tensor, slots: torch.Tensor, num_pages: int, page_size: int):
    """Returns (page, place in it, whether the slot exists) for logical slots; missing ones point to 0, 0."""
    index = slots // page_size
    exists = (slots >= 0) & (index < len(table))
    page = torch.full_like(slots, -1)
    page[exists] = table[index[exists]].to(torch.int64)
    exists &= (page >= 0) & (page < num_pages)
    return torch.where(exists, page, 0), torch.where(exists, slots % page_size, 0), exists


def gather(caches: tuple[torch.Tensor, ...], table: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns rows [slots, Hkv, D] of each cache, 0 where a slot does not exist, and whether each slot exists."""
    page, place, exists = find_slots(table, slots, *caches[0].shape[:2])
    # a slot that does not exist points to page 0, which a pool without pages does not have
    rows = (cache.new_zeros((len(slots), *cache.shape[2:])) for cache in caches)
    if exists.any():
        rows = (cache[page, place].masked_fill(~exists[:, None, None], 0.0) for cache in map(widened, caches))
    return (*rows, exists)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns tensors of 8 bits, with which torch computes little, as float32; others as they are."""
    return tensor.to(torch.float32) if tensor.element_size() == 1 else tensor


def scaled_keys(key, value, k_scale, v_scale, dtype):
    """Returns keys and values [keys, Hkv, D] times their scales [Hkv] or [1]."""
    key, value = key.to(dtype), value.to(dtype)
    if k_scale is not None:
        key = key * k_scale.to(dtype)[:, None]
    if v_scale is not None:
        value = value * v_scale.to(dtype)[:, None]
    return key, value


def attention(query, key, value, visible, sm_scale, soft_cap=None, sinks=None):
    """Returns output [rows, Hq, D] and lse [rows, Hq] of query [rows, Hq, D] over key and value [keys, Hkv, D].
    `visible` is bool [rows, keys]; a row that sees no key has output 0, and lse -inf or its sink. sinks [Hq]: one more
    logit per head, that has no value. Computed in float32, or in float64 for float64 queries."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(group_size, dim=1)
    # a key that nobody sees may hold anything, NaN included
    value = value.to(dtype).repeat_interleave(group_size, dim=1)
    value = torch.where(visible.any(0)[:, None, None], value, 0.0)
    scale = query.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    logits = torch.einsum("qhd,khd->hqk", query.to(dtype), key) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    weights = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(logits - lse[..., None]))
    output = torch.einsum("hqk,khd->qhd", weights, value)
    return output.to(query.dtype), lse.transpose(0, 1)
