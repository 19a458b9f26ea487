"""The paged KV cache: its layout and its limits.

k_cache and v_cache are [num_pages, page_size, Hkv, D]. Slot t of a request lies in the request's (t // page_size)-th
page. Page ids outside 0..num_pages - 1 and slots outside the page table are never dereferenced.

Only the D elements of a head need lie together. Pages, slots and heads are strided by whole rows of D, so that each
layout that servers use is a view of this one: keys beside values in a page or in a head, heads outside of slots, layers
inside of pages. Slots and heads have the same strides in both caches. These are constants of a kernel, since a process
has few layouts and addresses in a page are then computed once; strides of pages are arguments.
"""

import math
from collections.abc import Sequence

import torch

from ..runtime import check

MAX_PAGE_SIZE = 256
MIN_HEAD_DIM, MAX_HEAD_DIM = 4, 512


def check_row_strides(
    args: check.Arguments, name: str, value: torch.Tensor, leading: int, most_rows: float = 2**32 - 1
) -> None:
    """Checks that the `leading` axes step over whole rows of D elements, so that kernels know that rows are aligned.
    most_rows: how many rows there may be from the first to the last one; kernels count them in uint32."""
    head_dim = value.shape[-1]
    if head_dim == 0:
        args.fail(name, "have heads of at least one element", f"shape {list(value.shape)}")
    rows = math.prod(value.shape[leading:-1])
    for axis in range(leading):
        if value.shape[axis] > 1 and value.stride(axis) % head_dim:
            args.fail(name, f"have strides that are multiples of D = {head_dim}", list(value.stride()))
        rows += max(value.shape[axis] - 1, 0) * value.stride(axis) // head_dim
    if rows > most_rows:
        args.fail(name, f"span less than 2^32 rows of D = {head_dim} elements", f"{rows} rows")


def check_pool(
    args: check.Arguments, dtypes: Sequence[torch.dtype], layers: tuple[str, ...] = (), most_rows: float = 2**32 - 1
) -> None:
    """Checks k_cache and v_cache, of one dtype and one layout of their pages.
    layers: the names of axes before those of a pool. most_rows: as in `check_row_strides`."""
    k_cache, v_cache = args.values["k_cache"], args.values["v_cache"]
    for name in ("k_cache", "v_cache"):
        axes = (*layers, "num_pages", "page_size", "Hkv", "D")
        cache = args.tensor(name, axes, dtypes, contiguous=1)
        check_row_strides(args, name, cache, len(axes) - 1, most_rows)
        extent = cache.shape[-1]
        for stride, size in sorted(zip(cache.stride()[-3:-1], cache.shape[-3:-1])):
            if size > 1 and stride < extent:
                args.fail(name, "have slots and heads that do not overlap", f"strides {list(cache.stride())}")
            extent += max(size - 1, 0) * stride
    if v_cache.dtype != k_cache.dtype:
        args.fail("v_cache", f"have dtype {k_cache.dtype} like k_cache", v_cache.dtype)
    if slot_strides(v_cache) != slot_strides(k_cache):
        wanted = f"have the strides of k_cache, {list(k_cache.stride())}, for slots and heads"
        args.fail("v_cache", wanted, list(v_cache.stride()))


def slot_strides(cache: torch.Tensor) -> tuple[int, int]:
    """Returns the strides of a checked cache from slot to slot and from head to head, in rows of D.
    Where there is one slot or one head they are those of a dense cache, whatever torch says of that axis: they multiply
    0, and each other number would compile kernels anew."""
    page_size, num_heads, head_dim = cache.shape[-3:]
    stride_token = cache.stride(-3) // head_dim if page_size > 1 else num_heads
    return stride_token, cache.stride(-2) // head_dim if num_heads > 1 else 1


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
