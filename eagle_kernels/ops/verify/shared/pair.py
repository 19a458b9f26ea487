"""A row of the target's and a row of the draft's distributions side by side, read by the target's token ids.

`prepare_pair.py` checks such distributions and launches what makes them readable; `rows.py` reads a single row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .rows import Row, load_row, row_probs


class Pair(NamedTuple):
    """One row of the target and one of the draft."""

    target: Any  # Row
    draft: Any  # Row
    target_to_draft_ptr: Any  # see draft_ids


class PairRows(NamedTuple):
    """All rows of both, as an op got them."""

    target: Any  # Rows
    draft: Any  # Rows
    target_to_draft_ptr: Any
    num_ids: Any  # of all tokens that the target or the draft has


@triton.jit
def load_pair(
    rows,
    request,
    row,
    reads_draft,
    NUM_SLICES: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
):
    """Returns the Pair with the number `row` int64; the draft's row is empty where it is not to be read."""
    target = load_row(rows.target, request, row, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS)
    draft = load_row(rows.draft, request, row, NUM_SLICES, BLOCK_SLICE, DRAFT_IS_PROBS)
    size = tl.where(reads_draft, draft.size, 0)
    draft = Row(draft.row_ptr, size, draft.scale, draft.maximum, draft.total, draft.best)
    return Pair(target, draft, rows.target_to_draft_ptr)


@triton.jit
def draft_ids(target_to_draft_ptr, ids, is_token, vocab_size):
    """Returns the draft's ids of target tokens, -1 for those that the draft does not have.

    target_to_draft_ptr: not a pointer to int32 if the two vocabularies share their ids.
    """
    if target_to_draft_ptr.dtype.element_ty == tl.int32:
        is_known = is_token & (ids >= 0) & (ids < vocab_size)
        return tl.load(target_to_draft_ptr + ids, mask=is_known, other=-1)
    else:
        return tl.where(is_token, ids, -1)


@triton.jit
def draft_probs(row, target_to_draft_ptr, ids, is_token, vocab_size, IS_PROBS: tl.constexpr):
    """Returns q of target tokens, of a tile or of a single one."""
    if target_to_draft_ptr.dtype.element_ty == tl.int32:
        places = draft_ids(target_to_draft_ptr, ids, is_token, vocab_size)
        return row_probs(row, places, places >= 0, IS_PROBS)
    else:  # ids as they are, neighbours side by side: loads can be wide
        return row_probs(row, ids, is_token, IS_PROBS)


@triton.jit
def load_probs(pair, ids, is_token, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr):
    """Returns p and q of target tokens, of a tile or of a single one."""
    target = row_probs(pair.target, ids, is_token, TARGET_IS_PROBS)
    draft = draft_probs(pair.draft, pair.target_to_draft_ptr, ids, is_token, pair.target.size, IS_PROBS=DRAFT_IS_PROBS)
    return target, draft
