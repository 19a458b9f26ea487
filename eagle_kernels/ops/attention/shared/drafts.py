"""Draft blocks as attention takes them: rows, the mask or the chain that says what they see, and their positions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....primitives import paging
from ....runtime import check
from . import paged_cache

MAX_QUERY = 256
MAX_DRAFT_KEYS = 512


class DraftRows(NamedTuple):
    """The rows of a checked call, [B, Nq] or ragged [T]."""

    query: torch.Tensor
    is_ragged: bool
    batch: str | int  # the axis or number of requests
    num_query: int  # of a request, at most
    axes: tuple[str, ...]  # of rows
    num_keys: int | str  # draft keys of a request; ragged: the axis of all rows


def check_rows(args: check.Arguments) -> DraftRows:
    """Checks query, qo_indptr and max_query, and how many draft keys there are."""
    values = args.values
    is_ragged = values["qo_indptr"] is not None
    if is_ragged:
        query = args.tensor("query", ("T", "Hq", "D"), check.FLOAT, contiguous=2)
        num_query, axes = args.integer("max_query", 1, MAX_QUERY), ("T",)
        batch = paged_cache.check_bounds(args, args.size("T"))
        if values["num_draft_keys"] is not None:
            args.fail("num_draft_keys", "not be given with qo_indptr, from which it follows", values["num_draft_keys"])
        if values["key_positions"] is not None:
            args.fail("key_positions", "not be given with qo_indptr: keys are at the positions of the rows", "a tensor")
        num_keys = "T"
    else:
        query = args.tensor("query", ("B", "Nq", "Hq", "D"), check.FLOAT, contiguous=2)
        batch, num_query, axes = "B", args.size("Nq"), ("B", "Nq")
        if values["max_query"] is not None:
            args.fail("max_query", "not be given without qo_indptr: Nq already says it", values["max_query"])
        if not 1 <= num_query <= MAX_QUERY:
            args.fail("query", f"have Nq in 1..{MAX_QUERY}", num_query)
        num_keys = num_query
        if values["num_draft_keys"] is not None:
            num_keys = args.integer("num_draft_keys", 1, MAX_DRAFT_KEYS)
            if values["is_causal"] and num_keys < num_query:
                args.fail("num_draft_keys", f"be at least Nq = {num_query} with is_causal", num_keys)
    paging.check_row_strides(args, "query", query, len(axes))
    return DraftRows(query, is_ragged, batch, num_query, axes, num_keys)


def check_mask(args: check.Arguments, rows: DraftRows) -> None:
    """Checks tree_mask, or that there is none with is_causal."""
    values = args.values
    if bool(values["is_causal"]) == (values["tree_mask"] is not None):
        given = "both" if values["is_causal"] else "neither"
        args.fail("exactly one of tree_mask and is_causal=True", "be given", given)
    if getattr(values["tree_mask"], "dtype", None) == torch.bool:
        args.fail("tree_mask", "have dtype int64, as pack_tree_mask makes it of bool", "bool")
    tree_mask = args.tensor("tree_mask", (*rows.axes, None), (torch.int64,), optional=True)
    most_keys = rows.num_query if rows.is_ragged else rows.num_keys
    if tree_mask is not None and tree_mask.shape[-1] * 64 < most_keys:
        args.fail("tree_mask", f"hold a bit for each of {most_keys} draft keys", f"{tree_mask.shape[-1]} words")


def check_positions(args: check.Arguments, rows: DraftRows) -> None:
    """Checks positions and key_positions, which a window may need."""
    values, num_keys = args.values, rows.num_keys
    num_rows = rows.query.shape[0] if rows.is_ragged else args.size("B") * rows.num_query
    positions = args.tensor("positions", (num_rows,), check.INTEGER, optional=True)
    if not rows.is_ragged:
        args.tensor("key_positions", (args.size("B") * num_keys,), check.INTEGER, optional=True)
    if values["window"] is not None:
        if positions is None and values["tree_mask"] is not None:
            args.fail("positions", "be given with window and tree_mask, as a mask does not hold depths", None)
        if positions is not None and num_keys not in (rows.num_query, "T") and values["key_positions"] is None:
            args.fail("key_positions", "be given with window where the numbers of rows and draft keys differ", None)


def seen_slots(
    values: dict, filled: torch.Tensor, num_keys: int | str, is_beside: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first slot that each request's rows see, and the end of them, the draft block's included.

    is_beside: the draft block is not in the pool.
    """
    if values["qo_indptr"] is None:
        counted = torch.full_like(filled, num_keys)
    else:
        counted = values["qo_indptr"].diff().clamp(min=0).to(torch.int64)
    prefix, stop = filled, filled
    if not is_beside and values["kv_indptr"] is not None:
        prefix = (filled - counted).clamp(min=0)
    elif not is_beside:
        stop = torch.where(filled > 0, filled + counted, 0)
    return paged_cache.first_seen(prefix, values["window"]), torch.where(counted > 0, stop, 0)
