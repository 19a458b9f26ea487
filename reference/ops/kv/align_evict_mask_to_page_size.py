"""Reference of align_evict_mask_to_page_size: one token after another."""

import torch

from ...slots import lengths


def align_evict_mask_to_page_size(seq_lens: torch.Tensor, evict_mask: torch.Tensor, *, page_size: int) -> None:
    """See eagle_kernels/ops/kv/align_evict_mask_to_page_size.py."""
    for row, seq_len in zip(evict_mask, lengths(seq_lens)):
        last_token = seq_len + int((~row).sum()) - 1
        for place in range(len(row)):
            if (seq_len + place) // page_size == last_token // page_size:  # rounded down: no token, no page
                row[place] = False
