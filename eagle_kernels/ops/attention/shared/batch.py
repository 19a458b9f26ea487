"""How many keys each request of a batch has: the slots that its rows may see, and the draft block after them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .paged_cache import request_pages


class Batch(NamedTuple):
    """What determines how many keys each request has; see `request_pages` and `slot_range`."""

    page_indptr_ptr: Any
    lengths_ptr: Any
    qo_indptr_ptr: Any
    stride_page_table_request: Any
    table_size: Any
    batch_size: Any
    num_query: Any  # rows of a request, at most
    num_rows: Any  # of all requests
    num_drafts: Any  # draft keys of a request whose rows are not ragged
    reach: Any  # no query sees a slot more than this before the end of the prefix; None: they see all


@triton.jit
def slot_range(
    batch, request, DRAFTS: tl.constexpr, BLOCK_KEY: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CSR: tl.constexpr
):
    """Returns (first, prefix, stop) int32 of a request, or of each of several.

    Prefix slots first..prefix - 1 may be seen, and the draft block ends at stop - 1. DRAFTS says where the block is: ""
    nowhere, "counted" among the filled slots, "behind" them in the pool, or "beside" them in tensors of its own, with
    slots from the next multiple of BLOCK_KEY on.
    """
    is_live = request < batch.batch_size
    _, page_count, filled = request_pages(batch, request, is_live, PAGE_SIZE, IS_CSR)
    prefix, stop = filled, filled
    if DRAFTS != "":
        num_drafts, num_counted = batch.num_drafts, batch.num_drafts
        if batch.qo_indptr_ptr is not None:
            first_row = tl.load(batch.qo_indptr_ptr + request, mask=is_live, other=0).to(tl.int64)
            first_row = tl.minimum(tl.maximum(first_row, 0), batch.num_rows)
            last_row = tl.load(batch.qo_indptr_ptr + request + 1, mask=is_live, other=0).to(tl.int64)
            # drafts past max_query are in the pool too
            num_counted = tl.maximum(tl.minimum(last_row, batch.num_rows) - first_row, 0).to(tl.int32)
            num_drafts = tl.minimum(num_counted, batch.num_query)
        if DRAFTS == "counted":
            prefix = tl.maximum(filled - num_counted, 0)
            stop = tl.minimum(prefix + num_drafts, filled)
        elif DRAFTS == "behind":
            stop = tl.minimum(prefix + num_drafts, page_count * PAGE_SIZE)
        else:
            # a request that does not exist counts nothing
            stop = tl.cdiv(prefix, BLOCK_KEY) * BLOCK_KEY + tl.where(is_live, num_drafts, 0)
    first = prefix * 0
    if batch.reach is not None:
        first = tl.maximum(prefix - batch.reach, 0)
    return first, prefix, stop
