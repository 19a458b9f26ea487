"""Rows of req_to_token, and lists of what stands in them.

req_to_token [R, C] holds the pool slot of every token: column t of a request's row is the slot of its token t. Rows
outside 0..R - 1, columns outside 0..C - 1 and entries below 0 are no slots; whoever reads them reads -1.

The lists of all requests stand one after another in one buffer of `capacity` entries, told apart by the running sum of
their lengths (CSR). Lengths are the device's, so a buffer can turn out too small: then entries past it are not written,
no bound exceeds `capacity`, and `overflow` holds the room that was needed. Entries that no list uses are -1.
"""

from __future__ import annotations

import torch

from ..runtime import check
from ..runtime.language import tl, triton

MAX_CAPACITY = 2**31 - 1


@triton.jit
def read_lengths(lengths_ptr, request, is_wanted):
    """Lengths (or places in a row) int64 of one or many requests, limited so that no sum of them leaves int64."""
    length = tl.load(lengths_ptr + request, mask=is_wanted, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), 2147483647)


@triton.jit
def find_row(req_pool_indices_ptr, req_to_token_ptr, request, is_live, num_rows, stride_req_to_token_row):
    """(pointer to the request's row, whether there is one)."""
    row = tl.load(req_pool_indices_ptr + request, mask=is_live, other=-1).to(tl.int64)
    return req_to_token_ptr + row * stride_req_to_token_row, (row >= 0) & (row < num_rows)


@triton.jit
def read_slots(row_ptr, column, is_wanted, row_exists, row_size):
    """The pool slots int64 in these columns of a row, -1 where there are none."""
    in_row = is_wanted & row_exists & (column >= 0) & (column < row_size)
    return tl.maximum(tl.load(row_ptr + column, mask=in_row, other=-1).to(tl.int64), -1)


@triton.jit
def first_draft_column(seq_len, branch, TOPK: tl.constexpr, NUM_STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where in its request's row the draft tokens of a branch begin; they are next to each other from there on.

    Branches lie one after another behind the prefix. With pages and several branches each has pages of its own, which
    begin where the prefix's last page does and leave as much room as the prefix takes in that page.
    """
    if (PAGE_SIZE == 1) or (TOPK == 1):
        return seq_len + branch * NUM_STEPS
    else:
        pages = (seq_len % PAGE_SIZE + NUM_STEPS + PAGE_SIZE - 1) // PAGE_SIZE
        return seq_len + branch * pages * PAGE_SIZE


@triton.jit
def fill_unused(list_ptr, used, capacity, part, num_parts, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Program `part` of `num_parts` writes its share of the entries used..capacity - 1."""
    entry = tl.arange(0, BLOCK)
    for start in range(used + part.to(tl.int64) * BLOCK, capacity, num_parts * BLOCK):
        place = start + entry
        tl.store(list_ptr + place, tl.full([BLOCK], VALUE, tl.int32), mask=place < capacity)


@triton.jit
def store_overflow(overflow_ptr, needed, capacity):
    """`overflow`: the room that was needed if it exceeds capacity (limited to int32), else 0."""
    tl.store(overflow_ptr, tl.where(needed > capacity, tl.minimum(needed, 2147483647), 0).to(tl.int32))


def check_rows(args: check.Arguments) -> None:
    """Checks req_pool_indices [B] and req_to_token [R, C]."""
    args.tensor("req_pool_indices", ("B",), check.INTEGER)
    args.tensor("req_to_token", ("R", "C"), check.INTEGER, contiguous=1)


def row_arguments(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor) -> dict:
    """The launch arguments that describe checked rows."""
    return {
        "req_pool_indices_ptr": req_pool_indices,
        "req_to_token_ptr": req_to_token,
        "num_rows": req_to_token.shape[0],
        "row_size": req_to_token.shape[1],
        "stride_req_to_token_row": req_to_token.stride(0),
    }


# Kernels that take `row_arguments` name these in do_not_specialize.
ROW_SIZES = ["num_rows", "row_size", "stride_req_to_token_row"]


def check_capacity(args: check.Arguments, name: str = "capacity") -> int:
    """The room for a list, an argument of the op."""
    return args.integer(name, 0, MAX_CAPACITY)


def check_keep_unused(args: check.Arguments) -> None:
    """keep_unused says something about what the caller's buffers hold."""
    if args.values["keep_unused"] and args.values.get("out") is None:
        args.fail("keep_unused", "come with out, whose unused entries it keeps", True)
