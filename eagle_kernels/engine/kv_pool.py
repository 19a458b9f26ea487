"""Paged keys and values of one model, and the `attend` functions that models call to write and read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from .models.causal_attend import causal_attend
from .models.protocol import KVShape


class KVPool:
    """Pages for a batch: `k_cache, v_cache [L, num_pages, page_size, Hkv, D]` and `block_table [B, max_pages]`.

    Request b holds `capacities[b]` slots; slot s lies in page `block_table[b, s // page_size]`. Unused table entries
    are -1.
    """

    def __init__(
        self, shape: KVShape, capacities: Sequence[int], page_size: int, dtype: torch.dtype, device: torch.device
    ):
        pages = [-(-capacity // page_size) for capacity in capacities]
        size = (shape.num_layers, sum(pages), page_size, shape.num_kv_heads, shape.head_dim)
        self.k_cache = torch.zeros(size, dtype=dtype, device=device)
        self.v_cache = torch.zeros(size, dtype=dtype, device=device)
        self.page_size = page_size
        table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        first = 0
        for request, count in enumerate(pages):
            table[request, :count] = torch.arange(first, first + count)
            first += count
        self.block_table = table.to(device)

    def rows(self, slots: Tensor, requests: slice = slice(None)) -> Tensor:
        """Rows int64 in a layer's caches, seen as [num_pages * page_size, Hkv, D], of slots [B, T]."""
        pages = self.block_table[requests].to(torch.int64).gather(1, slots // self.page_size)
        return pages * self.page_size + slots % self.page_size

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key, value [B, T, Hkv, D] at rows [B, T]."""
        self.k_cache[layer].flatten(0, 1)[rows] = key
        self.v_cache[layer].flatten(0, 1)[rows] = value


class PromptAttend:
    """`attend` of a prompt: one request, causal, written at slots 0..T-1."""

    def __init__(self, pool: KVPool, request: int, num_tokens: int):
        self._pool = pool
        slots = torch.arange(num_tokens, device=pool.block_table.device)[None]
        self._rows = pool.rows(slots, slice(request, request + 1))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        self._pool.write(layer, self._rows, key, value)
        return causal_attend(layer, query, key, value, window)


class TreeAttend:
    """`attend` of T tree rows per request: they see the committed prefix, and the draft slots that the mask names.

    lengths     [B] committed slots
    first       the draft slot of row 0: slots first .. first + T - 1 behind the prefix are written
    tree_mask   [B, T, W] packed words over draft slots 0 .. first + T - 1
    positions       [B, T] of the rows, and
    key_positions   [B, first + T] of the draft slots, by default those of the rows: for layers with a sliding window
    """

    def __init__(
        self,
        pool: KVPool,
        lengths: Tensor,
        first: int,
        num_rows: int,
        tree_mask: Tensor,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ):
        self._pool = pool
        self._lengths = lengths
        self._num_draft_keys = first + num_rows
        self.tree_mask = tree_mask
        self._positions, self._key_positions = positions, key_positions
        slots = lengths[:, None] + torch.arange(first, first + num_rows, device=lengths.device)
        self._rows = pool.rows(slots)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        self._pool.write(layer, self._rows, key, value)
        return ops.tree_attention(
            query.contiguous(),
            self._pool.k_cache[layer],
            self._pool.v_cache[layer],
            self.tree_mask,
            num_draft_keys=self._num_draft_keys,
            block_table=self._pool.block_table,
            seq_lens=self._lengths,
            **({} if window is None else self._window_arguments(window)),
        ).output

    def _window_arguments(self, window: int) -> dict:
        key_positions = self._key_positions
        return {
            "window": window,
            "positions": self._positions.flatten().contiguous(),
            "key_positions": None if key_positions is None else key_positions.flatten().contiguous(),
        }


class DecodeAttend:
    """`attend` of plain decoding: one new row per request, behind its prefix."""

    def __init__(self, pool: KVPool, lengths: Tensor):
        self._pool = pool
        self._seq_lens = lengths + 1
        self._rows = pool.rows(lengths[:, None])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        self._pool.write(layer, self._rows, key, value)
        return ops.gqa_decode(
            query[:, 0].contiguous(),
            self._pool.k_cache[layer],
            self._pool.v_cache[layer],
            block_table=self._pool.block_table,
            seq_lens=self._seq_lens,
            window=window,
        ).output[:, None]
