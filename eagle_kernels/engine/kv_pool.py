"""Paged keys and values of one model, who owns which page, and the `attend` functions that write and read them.

The ops take what `protocol.Attend` says of scales, soft caps and sinks by the same names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .models.protocol import KVShape


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1; lives on the host, so that nobody waits for the device to learn them."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` page ids, the longest free ones first; None if there are not so many."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


class KVPool:
    """The pages of one model: `k_cache, v_cache [L, num_pages, page_size, Hkv, D]`."""

    def __init__(self, shape: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        size = (shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        self.k_cache = torch.zeros(size, dtype=dtype, device=device)
        self.v_cache = torch.zeros(size, dtype=dtype, device=device)
        self.page_size = page_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key, value [B, T, Hkv, D] at slots [B * T]; those of -1 are dropped."""
        ops.write_kv(key.flatten(0, 1), value.flatten(0, 1), self.k_cache[layer], self.v_cache[layer], slots)


def bytes_per_page(shape: KVShape, page_size: int, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * page_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def find_slots(block_table: Tensor, first: Tensor, count: int, page_size: int) -> Tensor:
    """Slots int64 [B, count] of the tokens first[b] .. first[b] + count - 1 of each request.

    block_table  [B, max_pages] int32 page ids, -1 where there is none; slot s is row s % page_size of page
                 s // page_size of a pool. Tokens without a page have slot -1.
    """
    token = first[:, None] + torch.arange(count, device=first.device)
    index = token // page_size
    page = block_table.gather(1, index.clamp(max=block_table.shape[1] - 1)).to(torch.int64)
    is_there = (page >= 0) & (index < block_table.shape[1])
    return torch.where(is_there, page * page_size + token % page_size, -1)


class PrefillAttend:
    """`attend` of a part of a prompt: one request, causal, tokens start .. start + T - 1 behind those before them.

    block_table  [1, max_pages], the request's row
    """

    def __init__(self, pool: KVPool, block_table: Tensor, start: int, num_tokens: int):
        self._pool, self._block_table, self._num_tokens = pool, block_table, num_tokens
        device = block_table.device
        first = torch.full((1,), start, dtype=torch.int64, device=device)
        self._slots = find_slots(block_table, first, num_tokens, pool.page_size).flatten()
        self._seq_lens = first + num_tokens
        self._bounds = torch.arange(2, dtype=torch.int64, device=device) * num_tokens

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, **options: Any
    ) -> Tensor:
        self._pool.write(layer, self._slots, key, value)
        return ops.prefill_attention(
            query[0],
            self._bounds,
            k_cache=self._pool.k_cache[layer],
            v_cache=self._pool.v_cache[layer],
            block_table=self._block_table,
            seq_lens=self._seq_lens,
            max_query=self._num_tokens,
            window=window,
            **options,
        ).output[None]


class TreeAttend:
    """`attend` of T tree rows per request: they see the committed prefix, and the draft keys that the mask names.

    block_table    [B, max_pages]
    lengths        [B]          committed tokens
    slots          [B, T]       where the rows' own keys go; draft keys before them have been written
    tree_mask      [B, T, W]    packed words over draft keys 0 .. num_draft_keys - 1; None: a chain, causal
    positions      [B, T]       of the rows, and
    key_positions  [B, num_draft_keys] of the draft keys, None where they are the rows; for sliding windows
    """

    def __init__(
        self,
        pool: KVPool,
        block_table: Tensor,
        lengths: Tensor,
        slots: Tensor,
        num_draft_keys: int,
        tree_mask: Tensor | None,
        positions: Tensor,
        key_positions: Tensor | None = None,
    ):
        self._pool, self._block_table, self._lengths = pool, block_table, lengths
        self._slots = slots.flatten().contiguous()
        self._num_draft_keys = num_draft_keys
        self.tree_mask = tree_mask
        self._positions, self._key_positions = positions, key_positions

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, **options: Any
    ) -> Tensor:
        self._pool.write(layer, self._slots, key, value)
        positions = {}
        if window is not None:
            positions["positions"] = self._positions.flatten().contiguous()
            if self._key_positions is not None:
                positions["key_positions"] = self._key_positions.flatten().contiguous()
        return ops.tree_attention(
            query,
            self._pool.k_cache[layer],
            self._pool.v_cache[layer],
            self.tree_mask,
            num_draft_keys=self._num_draft_keys,
            is_causal=self.tree_mask is None,
            block_table=self._block_table,
            seq_lens=self._lengths,
            window=window,
            **positions,
            **options,
        ).output


class DecodeAttend:
    """`attend` of plain decoding: one new row per request, behind its prefix; slots [B, 1]."""

    def __init__(self, pool: KVPool, block_table: Tensor, lengths: Tensor, slots: Tensor):
        self._pool, self._block_table = pool, block_table
        self._seq_lens = lengths + 1
        self._slots = slots.flatten().contiguous()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, **options: Any
    ) -> Tensor:
        self._pool.write(layer, self._slots, key, value)
        return ops.gqa_decode(
            query[:, 0],
            self._pool.k_cache[layer],
            self._pool.v_cache[layer],
            block_table=self._block_table,
            seq_lens=self._seq_lens,
            window=window,
            **options,
        ).output[:, None]
