"""A row of the target's and a row of the draft's distributions side by side, read by the target's token ids.
`prepare_pair.py` checks such distributions and launches what makes them readable; `rows.py` reads a single row."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.rows import Row, load_row, row_probs
from ....runtime.language import tl, triton


class Pair(NamedTuple):
    """One row of the target and one of the draft."""

    target: Any  # Row
    draft: Any  # Row


class PairRows(NamedTuple):
    """All rows of both, as an op got them. As it may hold None, no device function returns it."""

    target: Any  # Rows
    draft: Any  # Rows
    target_to_draft: Any  # pointer int32 [V], see draft_ids; None: the two vocabularies share their ids
    num_ids: Any  # of all tokens that the target or the draft has


@triton.jit
def load_pair(rows, request, row, reads_draft, NUM_SLICES: tl.constexpr):
    """Returns the Pair with the number `row` int64; the draft's row is empty where it is not to be read."""
    target = load_row(rows.target, request, row, NUM_SLICES)
    draft = load_row(rows.draft, request, row, NUM_SLICES)
    size = tl.where(reads_draft, draft.size, 0)
    return Pair(target, Row(draft.row_ptr, size, draft.scale, draft.maximum, draft.total, draft.best))


@triton.jit
def draft_ids(rows, ids, is_token, vocab_size):
    """Returns the draft's ids of target tokens, -1 for those that the draft does not have."""
    if rows.target_to_draft is not None:
        is_known = is_token & (ids >= 0) & (ids < vocab_size)
        return tl.load(rows.target_to_draft + ids, mask=is_known, other=-1)
    else:
        return tl.where(is_token, ids, -1)


@triton.jit
def draft_probs(rows, row, ids, is_token, vocab_size):
    """Returns q of target tokens, of a tile or of a single one."""
    if rows.target_to_draft is not None:
        places = draft_ids(rows, ids, is_token, vocab_size)
        return row_probs(rows.draft, row, places, places >= 0)
    else:  # ids as they are, neighbours side by side: loads can be wide
        return row_probs(rows.draft, row, ids, is_token)


@triton.jit
def load_probs(rows, pair, ids, is_token):
    """Returns p and q of target tokens, of a tile or of a single one."""
    target = row_probs(rows.target, pair.target, ids, is_token)
    return target, draft_probs(rows, pair.draft, ids, is_token, pair.target.size)
