"""A row of the target's and a row of the draft's distributions side by side, read by the target's token ids.

`prepare_pair.py` checks such distributions and launches what makes them readable; `rows.py` reads a single row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .rows import row_probs


class Pair(NamedTuple):
    """One row of the target and one of the draft."""

    target: Any  # Row
    draft: Any  # Row
    target_to_draft_ptr: Any  # see draft_ids


@triton.jit
def draft_ids(target_to_draft_ptr, ids, is_token, vocab_size):
    """Returns the draft's ids of target tokens, -1 for those that the draft does not have.

    target_to_draft_ptr: None if the two vocabularies share their ids.
    """
    if target_to_draft_ptr is not None:
        is_known = is_token & (ids >= 0) & (ids < vocab_size)
        return tl.load(target_to_draft_ptr + ids, mask=is_known, other=-1)
    else:
        return tl.where(is_token, ids, -1)


@triton.jit
def draft_probs(row, target_to_draft_ptr, ids, is_token, vocab_size, IS_PROBS: tl.constexpr):
    """Returns q of target tokens, of a tile or of a single one."""
    if target_to_draft_ptr is None:  # ids as they are, neighbours side by side: loads can be wide
        return row_probs(row, ids, is_token, IS_PROBS)
    else:
        places = draft_ids(target_to_draft_ptr, ids, is_token, vocab_size)
        return row_probs(row, places, places >= 0, IS_PROBS)


@triton.jit
def load_probs(pair, ids, is_token, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr):
    """Returns p and q of target tokens, of a tile or of a single one."""
    target = row_probs(pair.target, ids, is_token, TARGET_IS_PROBS)
    draft = draft_probs(
        pair.draft, pair.target_to_draft_ptr, ids, is_token, pair.target.size, IS_PROBS=DRAFT_IS_PROBS
    )
    return target, draft
