"""Packs a tree mask of any layout into words, a bit per draft key: the form that attention reads.

Computes: Each row's cells, or the words of its layout, as words of 64 bits.
Invariants: Reads stay within a FULL_MASK that is too short for its lengths.
Grid: (B, row blocks), one program packs a block of rows.
Launches: 1
Traffic: 1 byte a cell (or the words) read, the prefix of FULL_MASK not counted, 8 B Nq ceil(Nk / 64) written, for Nq
    rows and Nk draft keys of each request.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared.tree_mask import TreeMaskMode, check_lengths, check_mask, convert, mask_spec


def contract(values: dict) -> check.Spec:
    args = check.Arguments("pack_tree_mask", values)
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    num_nodes = None if values["num_verify_tokens"] is None else args.integer("num_verify_tokens", 1)
    if mode == TreeMaskMode.FULL_MASK:  # the lengths say how many requests there are
        check_lengths(args, mode)
    sizes = check_mask(args, mode, num_nodes)
    if mode != TreeMaskMode.FULL_MASK:
        args.bind("B", sizes[0], "tree_mask")
        check_lengths(args, mode)
    return mask_spec(args, TreeMaskMode.PACKED, *sizes)


@launcher
def pack_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    *,
    num_verify_tokens: int | None = None,
    tree_mask_mode: str = TreeMaskMode.QLEN_ONLY,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packs a tree mask of any layout into int64 words, one bit per draft key: the layout that attention reads.

    Masks have Nq query rows and Nk draft keys. "packed" and "qlen_only" need not be square; elsewhere Nq = Nk = N.

    Args:
        tree_mask: [B, Nq, Nk] bool or uint8 for "qlen_only", [B, Nq, W] int64 for "packed". What each row sees, in the
            layout `tree_mask_mode`.
        seq_lens: None or [B] int. For "full_mask" only: committed tokens, the root not counted.
        num_verify_tokens: Nk. Needed by "full_mask" and by a flat "qlen_only". None for "packed": 64 * W.
        tree_mask_mode: a `TreeMaskMode`.
        out: a tensor to write into.

    Returns:
        [B, Nq, ceil(Nk / 64)] int64. Bit j % 64 of word j // 64: the row sees draft key j. Bits from Nk on are 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks seq_lens.

    Source:
        "packed" is eagle_kernels' own; the other layouts are SGLang's.

    Example:
        >>> tree_mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
        >>> eagle_kernels.pack_tree_mask(tree_mask).tolist()
        [[[1], [3], [5]]]
    """
    out = check.allocate("pack_tree_mask", contract(locals()), out)
    batch_size, num_rows, num_words = out.shape
    if num_verify_tokens is None:
        num_verify_tokens = 64 * num_words if tree_mask_mode == TreeMaskMode.PACKED else tree_mask.shape[-1]
    modes, sizes = (tree_mask_mode, TreeMaskMode.PACKED), (batch_size, num_rows, num_verify_tokens)
    convert("pack_tree_mask", tree_mask, seq_lens, out, modes, sizes)
    return out
