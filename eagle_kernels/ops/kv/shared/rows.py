"""Rows of req_to_token.

req_to_token [R, C] holds the pool slot of every token: column t of a request's row is the slot of its token t. Rows
outside 0..R - 1, columns outside 0..C - 1 and entries below 0 are no slots; they read as -1.
"""

from typing import Any, NamedTuple

import torch

from ....runtime import check
from ....runtime.language import tl, triton

# Kernels that take `row_arguments` name these in do_not_specialize.
ROW_SIZES = ["num_rows", "row_size", "stride_req_to_token_row"]


class Rows(NamedTuple):
    """Pointers to the arguments of these names."""

    req_pool_indices: Any
    req_to_token: Any


class Row(NamedTuple):
    """The row of one request."""

    ptr: Any
    exists: Any
    size: Any


@triton.jit
def find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row):
    """Returns the Row of a request."""
    row = tl.load(rows.req_pool_indices + request, mask=is_live, other=-1).to(tl.int64)
    return Row(rows.req_to_token + row * stride_req_to_token_row, (row >= 0) & (row < num_rows), row_size)


@triton.jit
def read_slots(row, column, is_wanted):
    """Returns the pool slots int64 in these columns of a row, -1 where there are none."""
    in_row = is_wanted & row.exists & (column >= 0) & (column < row.size)
    return tl.maximum(tl.load(row.ptr + column, mask=in_row, other=-1).to(tl.int64), -1)


@triton.jit
def first_draft_column(seq_len, branch, TOPK: tl.constexpr, NUM_STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Returns the column of its request's row where the draft tokens of a branch begin; they follow each other.
    Branches lie one after another after the prefix. With pages and several branches each branch has pages of its own,
    from the prefix's last page on, and leaves as much room at their beginning as the prefix takes in that page."""
    if (PAGE_SIZE == 1) or (TOPK == 1):
        return seq_len + branch * NUM_STEPS
    else:
        pages = (seq_len % PAGE_SIZE + NUM_STEPS + PAGE_SIZE - 1) // PAGE_SIZE
        return seq_len + branch * pages * PAGE_SIZE


def check_rows(args: check.Arguments) -> None:
    """Checks req_pool_indices [B] and req_to_token [R, C]."""
    args.tensor("req_pool_indices", ("B",), check.INTEGER)
    args.tensor("req_to_token", ("R", "C"), check.INTEGER, contiguous=1)


def debug_rows(args: check.Arguments, lengths: tuple[str, ...], stop, is_read=None, rule: str = "end") -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 lengths, and what checked rows hold where they are read.
    lengths: names of the arguments [B] that say which tokens; an error names the last where they leave the table.
    stop: stop() gives the end of the columns that each request reads or writes, [B] int64; 0 for none.
    is_read: is_read(column) tells which of the columns [1, C] a request reads, bool [B, C]. None: they are written."""
    if not check.DEBUG:
        return
    values = args.values
    rows, table = values["req_pool_indices"], values["req_to_token"]
    num_rows, num_columns = table.shape
    for name in lengths:
        args.debug(name, "not be negative", lambda name=name: values[name] >= 0)
    for name in lengths[-1:]:
        args.debug(name, f"{rule} within the {num_columns} columns of req_to_token", lambda: stop() <= num_columns)
    row_exists = lambda: (rows >= 0) & (rows < num_rows) | (stop() <= 0)  # noqa: E731
    args.debug("req_pool_indices", f"name one of the {num_rows} rows of req_to_token", row_exists)
    if is_read is None or table.numel() == 0:
        return
    holds = lambda: ~_is_wanted(args, stop, is_read) | (table[rows.clamp(0, num_rows - 1)] >= 0)  # noqa: E731
    args.debug("req_to_token", "hold slots of the pool where it is read", holds, rows)


def check_listed(args: check.Arguments, listed: check.Spec, stop, is_read, unit: int = 1) -> check.Spec:
    """Returns the spec of a list; checks that it holds the slots that are read, each divided by `unit`, if it is int32.
    stop, is_read: as in `debug_rows`. Without EAGLE_KERNELS_DEBUG=1 this is checked for references alone."""
    rows, table = args.values["req_pool_indices"], args.values["req_to_token"]
    if table.dtype == listed.dtype or listed.dtype == torch.int64 or table.numel() == 0:
        return listed

    def holds() -> torch.Tensor:
        is_held = table // unit <= check.MAX_INT32
        if is_held.all():
            return is_held
        row_exists = (rows >= 0) & (rows < len(table))
        return ~(_is_wanted(args, stop, is_read) & row_exists[:, None]) | is_held[rows.clamp(0, len(table) - 1)]

    args.debug("req_to_token", "fit in int32, or out hold int64, where it is read", holds, rows, of_reference=True)
    return listed


def _is_wanted(args: check.Arguments, stop, is_read) -> torch.Tensor:
    """Returns which columns of its row each request reads, bool [B, C]."""
    column = torch.arange(args.size("C"), device=args.device)
    return is_read(column[None, :]) & (column < stop()[:, None])


def draft_columns(seq_lens: torch.Tensor, topk: int, num_steps: int, page_size: int):
    """Returns what `debug_rows` is to know of drafts in the columns of `first_draft_column`: stop, is_read, and end.
    A request without a prefix may be a row that pads the batch: it has an end, but its stop is 0."""

    def prefix() -> torch.Tensor:
        return seq_lens.to(torch.int64).clamp(0, check.MAX_INT32)

    def room() -> torch.Tensor:
        if page_size == 1 or topk == 1:
            return torch.full_like(prefix(), num_steps)
        return (prefix() % page_size + num_steps + page_size - 1) // page_size * page_size

    def end() -> torch.Tensor:
        return prefix() + (topk - 1) * room() + num_steps

    def stop() -> torch.Tensor:
        return torch.where(seq_lens > 0, end(), 0)

    def is_read(column: torch.Tensor) -> torch.Tensor:
        place = column - prefix()[:, None]
        return (place >= 0) & (place % room()[:, None] < num_steps)

    return stop, is_read, end


def row_arguments(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor) -> dict:
    """Returns the launch arguments that describe checked rows."""
    return {
        "rows": Rows(req_pool_indices, req_to_token), "num_rows": req_to_token.shape[0],
        "row_size": req_to_token.shape[1], "stride_req_to_token_row": req_to_token.stride(0),
    }  # fmt: skip
