"""Writes packed tree masks in the layout that another attention kernel reads.

Computes: Each row's bits as cells, or as the words of its layout.
Invariants: Writes stay within a FULL_MASK whose size contradicts seq_lens.
Grid: (B, row blocks), one program writes a block of rows.
Launches: 1
Traffic: 8 B Nq W read, 1 byte a cell (or the words) written, for Nq rows of W words of each request.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared.tree_mask import TreeMaskMode, check_lengths, check_mask, convert, mask_spec


def contract(values: dict) -> check.Spec:
    args = check.Arguments("unpack_tree_mask", values)
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    args.tensor("tree_mask", ("B", "Nq", None), (torch.int64,))
    batch_size, num_rows = args.size("B"), args.size("Nq")
    num_keys = num_rows if values["num_verify_tokens"] is None else args.integer("num_verify_tokens", 1)
    check_mask(args, TreeMaskMode.PACKED, num_keys)
    is_square = mode in (TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY_BITPACKING)
    if values["num_verify_tokens"] is None and not is_square:
        rule = f"have no key from Nq = {num_rows} on without num_verify_tokens"
        args.debug("tree_mask", rule, lambda: _keys_from(num_rows, values["tree_mask"]) == 0)
    if num_keys != num_rows and is_square:
        args.fail("num_verify_tokens", f"be Nq = {num_rows} for '{mode}', which has a row for each key", num_keys)
    check_lengths(args, mode)
    return mask_spec(args, mode, batch_size, num_rows, num_keys, values.get("out"))


def _keys_from(num_keys: int, tree_mask: torch.Tensor) -> torch.Tensor:
    """Returns the bits of each word that stand for keys from num_keys on; only the last word has such bits."""
    spare = -1 << num_keys % 64 if num_keys % 64 else 0
    words = [0] * (tree_mask.shape[2] - 1) + [spare]
    return tree_mask & torch.tensor(words, dtype=torch.int64, device=tree_mask.device)


@launcher
def unpack_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    seq_lens_sum: int | None = None,
    *,
    num_verify_tokens: int | None = None,
    tree_mask_mode: str = TreeMaskMode.QLEN_ONLY,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes a packed tree mask in another layout.

    Masks have Nq query rows and Nk draft keys. "packed" and "qlen_only" need not be square; elsewhere Nq = Nk = N.

    Args:
        tree_mask: [B, Nq, ceil(Nk / 64)] int64, packed. Bits from Nk on are ignored.
        seq_lens: None or [B] int. For "full_mask" only: committed tokens, the root not counted.
        seq_lens_sum: their sum, for a "full_mask" without `out`.
        num_verify_tokens: Nk. None: Nq. Pass i * K for the `ancestors` of the beams that draft level i, or their keys
            from K on are silently cut off.
        tree_mask_mode: layout of the result, a `TreeMaskMode`.
        out: a tensor to write into.

    Returns:
        [B, Nq, Nk] bool for "qlen_only", [B, Nq, ceil(Nk / 64)] int64 for "packed", with bits from Nk on 0. What each
        row sees.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks seq_lens, seq_lens_sum and the size of a "full_mask", and without
        num_verify_tokens that no row sees a key from Nq on.

    Source:
        "packed" is eagle_kernels' own; the other layouts are SGLang's.

    Example:
        >>> eagle_kernels.unpack_tree_mask(torch.tensor([[[1], [3], [5]]])).int().tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    """
    out = check.allocate("unpack_tree_mask", contract(locals()), out)
    batch_size, num_rows, _ = tree_mask.shape
    modes = TreeMaskMode.PACKED, tree_mask_mode
    sizes = batch_size, num_rows, num_rows if num_verify_tokens is None else num_verify_tokens
    convert("unpack_tree_mask", tree_mask, seq_lens, out, modes, sizes)
    return out
