"""The layouts of a tree mask."""

from __future__ import annotations

from enum import Enum

from ..runtime.language import tl, triton


class TreeMaskMode(str, Enum):
    """The layouts of a tree mask; the plain strings are accepted everywhere as well."""

    PACKED = "packed"
    FULL_MASK = "full_mask"
    QLEN_ONLY = "qlen_only"
    QLEN_ONLY_BITPACKING = "qlen_only_bitpacking"

    def __str__(self) -> str:
        return self.value


@triton.jit
def full_mask_start(seq_lens_ptr, request, batch_size, NUM_NODES: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Where the block of `request` starts in the flat FULL_MASK: the cells of all requests before it."""
    length_before = tl.zeros([BLOCK_BATCH], dtype=tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        length_before += tl.load(seq_lens_ptr + other, mask=other < request, other=0).to(tl.int64)
    return NUM_NODES * (tl.sum(length_before) + request * NUM_NODES)
