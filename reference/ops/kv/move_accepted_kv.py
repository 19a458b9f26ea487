"""Reference of move_accepted_kv: one row after another."""

import ctypes

import torch

from ...paged_attention import find_slots


def move_accepted_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    *, num_verify_tokens: int, cache_addresses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See eagle_kernels/ops/kv/move_accepted_kv.py."""
    num_pages, page_size = k_cache.shape[1:3]
    caches = [k_cache, v_cache]
    if cache_addresses is not None:
        sides = zip(caches, cache_addresses.tolist())
        caches = [_cache_at(address, like) for like, addresses in sides for address in addresses if address > 0]
    paths, counts = accept_index.tolist(), accept_token_num.tolist()
    for request, seq_len in enumerate(seq_lens.to(torch.int64).clamp(max=2**62).tolist()):  # no slots are so far
        for depth, index in enumerate(paths[request][: max(counts[request] + 1, 0)]):
            node = index - request * num_verify_tokens
            if not 0 <= node < num_verify_tokens:
                continue
            slots = torch.tensor([seq_len + node, seq_len + depth], dtype=torch.int64, device=k_cache.device)
            page, place, exists = find_slots(block_table[request], slots, num_pages, page_size)
            if exists.all():
                for cache in caches:
                    cache[:, page[1], place[1]] = cache[:, page[0], place[0]].clone()


def _cache_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the cache at an address in host memory, with the shape, strides and dtype of another one."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()) if size > 1)
    memory = (ctypes.c_uint8 * (extent * like.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())
