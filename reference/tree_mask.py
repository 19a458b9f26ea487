"""Tree masks of every layout as truths [B, Nq, Nk] and back."""

from __future__ import annotations

import torch

_WORD_BITS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.int64: 64}


def read_mask(tree_mask: torch.Tensor, seq_lens: torch.Tensor | None, num_nodes: int | None, mode: str) -> torch.Tensor:
    """bool [B, Nq, Nk]; num_nodes, where given, is Nk. FULL_MASK cells outside the mask count as not set."""
    if mode == "qlen_only":
        square = tree_mask.view(-1, num_nodes, num_nodes) if tree_mask.dim() == 1 else tree_mask
        return square != 0
    if mode == "full_mask":
        key = torch.arange(num_nodes, device=tree_mask.device)
        lengths = seq_lens.to(torch.int64)
        width = (lengths + num_nodes)[:, None, None]
        start = num_nodes * (width.cumsum(0) - width)
        cell = start + key[:, None] * width + lengths[:, None, None] + key
        exists = (cell >= 0) & (cell < len(tree_mask))
        return exists & torch.cat([tree_mask, tree_mask.new_zeros(1)])[torch.where(exists, cell, -1)].ne(0)
    words = tree_mask[..., None] if mode == "qlen_only_bitpacking" else tree_mask
    bits = _WORD_BITS[words.dtype]
    if num_nodes is None:
        num_nodes = words.shape[1] if mode == "qlen_only_bitpacking" else bits * words.shape[-1]
    key = torch.arange(num_nodes, device=tree_mask.device)
    return (words.to(torch.int64)[..., key // bits] >> (key % bits)) & 1 == 1


def write_mask(visible: torch.Tensor, seq_lens: torch.Tensor | None, mode: str) -> torch.Tensor:
    """The bool mask [B, Nq, Nk] in the layout that `mode` names."""
    batch_size, num_rows, num_keys = visible.shape
    if mode == "qlen_only":
        return visible
    if mode == "full_mask":
        rows = [
            torch.cat([visible.new_ones(num_rows, seq_len), visible[request]], dim=1).flatten()
            for request, seq_len in enumerate(seq_lens.tolist())
        ]
        return torch.cat(rows) if rows else visible.new_empty(0)
    key = torch.arange(num_keys, device=visible.device)
    words = torch.zeros(batch_size, num_rows, -(-num_keys // 64), dtype=torch.int64, device=visible.device)
    for word in range(words.shape[-1]):
        inside = key // 64 == word
        # bits are distinct, so the sum is their union (bit 63 wraps to the sign as it should)
        words[:, :, word] = (visible[:, :, inside].to(torch.int64) << (key[inside] % 64)).sum(-1)
    if mode == "packed":
        return words
    dtype = torch.uint8 if num_keys <= 8 else torch.uint16 if num_keys <= 16 else torch.uint32
    return words[:, :, 0].to(dtype)
