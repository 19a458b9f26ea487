"""Reference of pack_tree_mask: read the mask as truths, write them as words."""

import torch

from ...tree_mask import read_mask, write_mask


def pack_tree_mask(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor | None = None,
    *, num_verify_tokens: int | None = None, tree_mask_mode: str = "qlen_only",
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/tree/pack_tree_mask.py."""
    return write_mask(read_mask(tree_mask, seq_lens, num_verify_tokens, tree_mask_mode), None, "packed")
