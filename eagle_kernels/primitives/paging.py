"""The paged KV cache: its layout and its limits.

k_cache and v_cache are [num_pages, page_size, Hkv, D]. Slot t of a request lies in the request's (t // page_size)-th
page. Page ids outside 0..num_pages - 1 and slots outside the page table are never dereferenced.
"""

from __future__ import annotations

import math

import torch

from ..runtime import check

MAX_PAGE_SIZE = 256
MIN_HEAD_DIM, MAX_HEAD_DIM = 4, 256


def check_row_strides(args: check.Arguments, name: str, value: torch.Tensor, leading: int) -> None:
    """Checks that the `leading` axes step over whole rows of D elements, so that kernels know that rows are aligned.
    Kernels count rows in uint32."""
    head_dim = value.shape[-1]
    if head_dim == 0:
        args.fail(name, "have heads of at least one element", f"shape {list(value.shape)}")
    rows = math.prod(value.shape[leading:-1])
    for axis in range(leading):
        if value.shape[axis] > 1 and value.stride(axis) % head_dim:
            args.fail(name, f"have strides that are multiples of D = {head_dim}", list(value.stride()))
        rows += max(value.shape[axis] - 1, 0) * value.stride(axis) // head_dim
    if rows >= 2**32:
        args.fail(name, f"span less than 2^32 rows of D = {head_dim} elements", f"{rows} rows")


def debug_pages(args: check.Arguments, name: str, num_pages: int, is_read) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 that a table names pages of the pool where is_read(), of its shape, is true.
    A row of block_table that is -1 throughout is no request's: it pads the batch."""
    table = args.values[name]
    rule = f"name one of the {num_pages} pages of the pool where it is read"

    def holds() -> torch.Tensor:
        is_named = (table >= 0) & (table < num_pages) | ~is_read()
        return is_named | (table == -1).all(-1, keepdim=True) if table.dim() == 2 else is_named

    args.debug(name, rule, holds)


def debug_bounds(args: check.Arguments, name: str, most: int) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 that bounds [B + 1] ascend within 0..most."""
    bounds = args.values[name]
    steps = lambda: torch.diff(bounds, prepend=torch.zeros_like(bounds[:1]))  # noqa: E731
    args.debug(name, f"ascend within 0..{most}", lambda: (steps() >= 0) & (bounds <= most))
