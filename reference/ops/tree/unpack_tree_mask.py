"""Reference of unpack_tree_mask: read the words as truths, write them as the layout asks."""

import torch

from ...tree_mask import read_mask, write_mask


def unpack_tree_mask(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor | None = None, seq_lens_sum: int | None = None,
    *, num_verify_tokens: int | None = None, tree_mask_mode: str = "qlen_only", out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/tree/unpack_tree_mask.py; `out` is not written."""
    num_keys = tree_mask.shape[1] if num_verify_tokens is None else num_verify_tokens
    visible = read_mask(tree_mask, None, num_keys, "packed")
    return write_mask(visible, seq_lens, tree_mask_mode, seq_lens_sum, out)
