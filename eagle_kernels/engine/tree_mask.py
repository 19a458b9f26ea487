"""Tree masks of every layout as the packed words that attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.tree.build_tree import TreeMaskMode


def pack_tree_mask(tree_mask: Tensor, mode: str, seq_lens: Tensor, num_nodes: int) -> Tensor:
    """Packed words int64 [B, N, ceil(N / 64)] from a mask that `build_tree` wrote in layout `mode`."""
    if mode == TreeMaskMode.PACKED:
        return tree_mask
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return tree_mask.to(torch.int64)[..., None]
    if mode == TreeMaskMode.FULL_MASK:
        node = torch.arange(num_nodes, device=seq_lens.device)
        width = (seq_lens + num_nodes)[:, None, None]
        start = (num_nodes * (seq_lens + num_nodes)).cumsum(0)[:, None, None] - num_nodes * width
        tree_mask = tree_mask[start + node[:, None] * width + seq_lens[:, None, None] + node]
    return pack_bits(tree_mask)


def pack_bits(mask: Tensor) -> Tensor:
    """Words int64 [..., ceil(N / 64)] of a bool mask [..., N]: bit j % 64 of word j // 64 is entry j."""
    bit = torch.arange(64, device=mask.device)
    words = [(part.to(torch.int64) << bit[: part.shape[-1]]).sum(-1) for part in mask.split(64, dim=-1)]
    return torch.stack(words, dim=-1)
