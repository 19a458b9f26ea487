"""Writes packed tree masks in the layout that another attention kernel reads.

Computes
    Each row's bits as cells, or as the words of its layout.
Invariants
    Writes stay within a FULL_MASK whose size contradicts seq_lens.
Grid
    (B, row blocks), one program writes a block of rows.
Launches
    1
Traffic
    8 B Nq W read, 1 byte a cell (or the words) written, for Nq rows of W words of each request.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_mask import (
    TreeMask,
    TreeMaskMode,
    check_lengths,
    check_mask,
    fill_prefix,
    load_keys,
    mask_spec,
    row_starts,
    store_keys,
)

# A program unpacks so many rows of one tree.
TUNING = {"default": {"BLOCK_ROW": 16, "BLOCK_FILL": 64, "num_warps": 4}}
# Rows are as long as the context: each has a program, since a small batch would leave most of the GPU idle.
FULL_MASK_TUNING = {"default": {"BLOCK_ROW": 1, "BLOCK_FILL": 512, "num_warps": 4}}


@triton.jit(do_not_specialize=["mask_size"])
def _unpack_tree_mask_kernel(
    tree_mask_ptr,
    seq_lens_ptr,
    output_ptr,
    mask_size,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    MASK_MODE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    is_row = row < NUM_ROWS
    source = row_starts(seq_lens_ptr, request, row, NUM_ROWS, NUM_KEYS, "packed")
    target = row_starts(seq_lens_ptr, request, row, NUM_ROWS, NUM_KEYS, MASK_MODE)
    if MASK_MODE == "full_mask":
        mask = TreeMask(output_ptr, seq_lens_ptr, mask_size)
        fill_prefix(
            mask, request, tl.program_id(1), tl.num_programs(1), NUM_KEYS, IS_ALIGNED,
            BLOCK_ROW=BLOCK_ROW, BLOCK_FILL=BLOCK_FILL,
        )  # fmt: skip
    for word in range((NUM_KEYS + 63) // 64):
        seen = load_keys(tree_mask_ptr, source, is_row, word, mask_size, NUM_KEYS, "packed")
        store_keys(output_ptr, target, is_row, word, seen, mask_size, NUM_KEYS, MASK_MODE)


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `unpack_tree_mask` and describes its output."""
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
        args.fail("num_verify_tokens", f"be Nq = {num_rows} for '{mode}', which has as many rows as keys", num_keys)
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

    Symbols: B requests, each with Nq query rows and Nk draft keys. Layouts whose masks are square have Nq = Nk = N.

    Args:
        tree_mask: [B, Nq, ceil(Nk / 64)] int64. Bit j % 64 of word j // 64: the row sees draft key j. Bits from Nk on
            are ignored.
        seq_lens: None or [B] int. Committed tokens of each request, the root not counted; int32 or int64. Needed by
            "full_mask", otherwise ignored.
        seq_lens_sum: their sum, a host integer. Needed by "full_mask" without `out`, whose size it gives.
        num_verify_tokens: Nk. None: as many draft keys as rows. The `ancestors` of `select_top_k_tokens` are not
            square: give i * K for the beams that draft level i, or their keys from K on are cut off without a word.
        tree_mask_mode: layout of the result, one of `TreeMaskMode`.
        out: a tensor to write into. A "full_mask" may be longer than needed: the rest is not written.

    Returns:
        What each row sees, written whole:
        "qlen_only": [B, Nq, Nk] bool.
        "full_mask": [sum of N * (seq_len + N)] bool, the rows of one request after those of another; True in the
            prefix. Where its size contradicts seq_lens, it holds what fits.
        "qlen_only_bitpacking": [B, N] uint8, uint16 or uint32, for N <= 8, 16 or 32. Bit j: the row sees key j.
        "packed": [B, Nq, ceil(Nk / 64)] int64. A copy, in which the bits from Nk on are 0.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range, "full_mask" without `seq_lens` or
            with neither `seq_lens_sum` nor `out`, Nk other than Nq where the layout is square, or more than 32 keys
            with "qlen_only_bitpacking"; the message names the argument.
        Not checked, unless EAGLE_KERNELS_DEBUG=1: that seq_lens are not negative, that seq_lens_sum is their sum, that
        a "full_mask" in `out` is long enough, and that rows of a layout that need not be square see no key from Nq on
        if num_verify_tokens is None.

    Source:
        "packed" is eagle_kernels' own; the other layouts are SGLang's (FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING).

    Example:
        >>> eagle_kernels.unpack_tree_mask(torch.tensor([[[1], [3], [5]]])).int().tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
        >>> eagle_kernels.unpack_tree_mask(
        ...     torch.tensor([[[1], [3]]]), torch.tensor([2]), 2, tree_mask_mode="full_mask").int().tolist()
        [1, 1, 1, 0, 1, 1, 1, 1]
    """
    out = check.allocate("unpack_tree_mask", contract(locals()), out)
    batch_size, num_rows, _ = tree_mask.shape
    is_full = tree_mask_mode == TreeMaskMode.FULL_MASK
    row = tuning.row(FULL_MASK_TUNING if is_full else TUNING, tree_mask.device)
    launch(
        "unpack_tree_mask",
        _unpack_tree_mask_kernel,
        (batch_size, triton.cdiv(num_rows, row["BLOCK_ROW"])),
        tree_mask_ptr=tree_mask,
        seq_lens_ptr=seq_lens,
        output_ptr=out,
        mask_size=out.numel(),
        NUM_ROWS=num_rows,
        NUM_KEYS=num_rows if num_verify_tokens is None else num_verify_tokens,
        MASK_MODE=str(tree_mask_mode),
        IS_ALIGNED=is_full and out.data_ptr() % 16 == 0,
        **row,
    )
    return out
