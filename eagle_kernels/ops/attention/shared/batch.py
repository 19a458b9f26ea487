"""How many keys each request of a batch has: the slots that its rows may see, and the draft block after them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .paged_cache import request_pages


class Shape(NamedTuple):
    """The constants of a call that device functions hand on."""

    GROUP_SIZE: int  # query heads of a KV head
    NUM_KV_HEADS: int
    HEAD_DIM: int
    PAGE_SIZE: int  # 0: keys are not in pages
    STRIDE_TOKEN: int  # of the slots of a page, in rows of HEAD_DIM
    STRIDE_HEAD: int  # of the KV heads of a slot, likewise
    ONE_SCALE: bool  # for all KV heads
    BLOCK_KEY: int
    DRAFTS: str = ""  # where the draft block is, see `slot_range`
    SHARE_TILES: int = 0  # tiles of keys of the first ordered shares (`ordered_shares.py`); 0: even chunks
    JOINED: int = 1  # KV heads that count as one head of as many times their elements, see `columns.spread_columns`
    VALUE_DIM: int = 0  # of a key, the first elements, which are its value too; 0: values lie apart and have HEAD_DIM


class Batch(NamedTuple):
    """What determines how many rows and keys each request has; see `request_pages` and `slot_range`."""

    lengths: Any
    stride_page_table_request: Any
    table_size: Any
    batch_size: Any
    num_query: Any  # rows of a request, at most
    num_rows: Any  # of all requests
    num_drafts: Any  # draft keys of a request whose rows are not ragged
    reach: Any  # no query sees a slot more than this before the end of the prefix; None: they see all


@triton.jit
def request_rows(qo_indptr_ptr, request, num_query, num_rows, is_live):
    """Returns (first row int64 of the flat [rows, heads], tokens int32) of a request's queries; none if not live."""
    if qo_indptr_ptr is None:
        return request * num_query, num_query
    else:
        first = tl.load(qo_indptr_ptr + request, mask=is_live, other=0).to(tl.int64)
        last = tl.load(qo_indptr_ptr + request + 1, mask=is_live, other=0).to(tl.int64)
        first = tl.minimum(tl.maximum(first, 0), num_rows)
        return first, tl.minimum(tl.maximum(tl.minimum(last, num_rows), first) - first, num_query).to(tl.int32)


@triton.jit
def slot_range(batch, request, SHAPE: tl.constexpr):
    """Returns (first, prefix, stop) int32 of a request, or of each of several.

    Prefix slots first..prefix - 1 may be seen, and the draft block ends at stop - 1. DRAFTS says where the block is: ""
    nowhere, "counted" among the filled slots, "after" them in the pool, or "beside" them in tensors of its own, with
    slots from the next multiple of BLOCK_KEY on.
    """
    DRAFTS: tl.constexpr = SHAPE.DRAFTS
    is_live = request < batch.batch_size
    _, page_count, filled = request_pages(batch, request, is_live, SHAPE.PAGE_SIZE)
    prefix, stop = filled, filled
    if DRAFTS != "":
        num_drafts, num_counted = batch.num_drafts, batch.num_drafts
        if batch.lengths.qo_indptr is not None:
            first_row = tl.load(batch.lengths.qo_indptr + request, mask=is_live, other=0).to(tl.int64)
            first_row = tl.minimum(tl.maximum(first_row, 0), batch.num_rows)
            last_row = tl.load(batch.lengths.qo_indptr + request + 1, mask=is_live, other=0).to(tl.int64)
            # drafts past max_query are in the pool too
            num_counted = tl.maximum(tl.minimum(last_row, batch.num_rows) - first_row, 0).to(tl.int32)
            num_drafts = tl.minimum(num_counted, batch.num_query)
        if DRAFTS == "counted":
            prefix = tl.maximum(filled - num_counted, 0)
            stop = tl.minimum(prefix + num_drafts, filled)
        elif DRAFTS == "after":
            stop = tl.minimum(prefix + num_drafts, page_count * SHAPE.PAGE_SIZE)
        else:
            # a request that does not exist counts nothing
            stop = tl.cdiv(prefix, SHAPE.BLOCK_KEY) * SHAPE.BLOCK_KEY + tl.where(is_live, num_drafts, 0)
    first = prefix * 0
    if batch.reach is not None:
        first = tl.maximum(prefix - batch.reach, 0)
    return first, prefix, stop
