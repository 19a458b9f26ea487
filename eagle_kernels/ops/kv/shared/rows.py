"""Rows of req_to_token.

req_to_token [R, C] holds the pool slot of every token: column t of a request's row is the slot of its token t. Rows
outside 0..R - 1, columns outside 0..C - 1 and entries below 0 are no slots; they read as -1.
"""

from __future__ import annotations

import torch

from ....runtime import check
from ....runtime.language import tl, triton

# Kernels that take `row_arguments` name these in do_not_specialize.
ROW_SIZES = ["num_rows", "row_size", "stride_req_to_token_row"]


@triton.jit
def find_row(req_pool_indices_ptr, req_to_token_ptr, request, is_live, num_rows, stride_req_to_token_row):
    """Returns (pointer to the request's row, whether there is one)."""
    row = tl.load(req_pool_indices_ptr + request, mask=is_live, other=-1).to(tl.int64)
    return req_to_token_ptr + row * stride_req_to_token_row, (row >= 0) & (row < num_rows)


@triton.jit
def read_slots(row_ptr, column, is_wanted, row_exists, row_size):
    """Returns the pool slots int64 in these columns of a row, -1 where there are none."""
    in_row = is_wanted & row_exists & (column >= 0) & (column < row_size)
    return tl.maximum(tl.load(row_ptr + column, mask=in_row, other=-1).to(tl.int64), -1)


@triton.jit
def first_draft_column(seq_len, branch, TOPK: tl.constexpr, NUM_STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Returns the column of its request's row where the draft tokens of a branch begin; they follow each other.

    Branches lie one after another after the prefix. With pages and several branches each branch has pages of its own,
    from the prefix's last page on, and leaves as much room at their beginning as the prefix takes in that page.
    """
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

    lengths: names of the arguments [B] that say which tokens; the last is told where they leave the table, by the rule.
    stop: stop() gives the end of the columns that each request reads or writes, [B] int64; 0 for none.
    is_read: is_read(column) tells which of the columns [1, C] a request reads, bool [B, C]. None: they are written.
    """
    if not check.DEBUG:
        return
    values = args.values
    rows, table = values["req_pool_indices"], values["req_to_token"]
    num_rows, num_columns = table.shape
    for name in lengths:
        args.debug(name, "not be negative", lambda name=name: values[name] >= 0)
    args.debug(lengths[-1], f"{rule} within the {num_columns} columns of req_to_token", lambda: stop() <= num_columns)
    row_exists = lambda: (rows >= 0) & (rows < num_rows) | (stop() <= 0)  # noqa: E731
    args.debug("req_pool_indices", f"name one of the {num_rows} rows of req_to_token", row_exists)
    if is_read is None or table.numel() == 0:
        return

    def holds():
        column = torch.arange(num_columns, device=table.device)
        is_wanted = is_read(column[None, :]) & (column < stop()[:, None])
        return ~is_wanted | (table[rows.clamp(0, num_rows - 1)] >= 0)

    args.debug("req_to_token", "hold slots of the pool where it is read", holds, rows)


def draft_columns(seq_lens: torch.Tensor, topk: int, num_steps: int, page_size: int):
    """Returns what `debug_rows` is to know of drafts in the columns of `first_draft_column`: stop and is_read.

    A request without a prefix may be a row that pads the batch, and has none.
    """

    def room() -> torch.Tensor:
        if page_size == 1 or topk == 1:
            return torch.full_like(seq_lens, num_steps)
        return (seq_lens % page_size + num_steps + page_size - 1) // page_size * page_size

    def stop() -> torch.Tensor:
        return torch.where(seq_lens > 0, seq_lens.to(torch.int64) + (topk - 1) * room() + num_steps, 0)

    def is_read(column: torch.Tensor) -> torch.Tensor:
        place = column - seq_lens[:, None]
        return (place >= 0) & (place % room()[:, None] < num_steps)

    return stop, is_read


def row_arguments(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor) -> dict:
    """Returns the launch arguments that describe checked rows."""
    return {
        "req_pool_indices_ptr": req_pool_indices,
        "req_to_token_ptr": req_to_token,
        "num_rows": req_to_token.shape[0],
        "row_size": req_to_token.shape[1],
        "stride_req_to_token_row": req_to_token.stride(0),
    }
