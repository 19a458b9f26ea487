"""The paged KV cache as attention reads it, and checks of the arguments.

The two forms of a page table, `block_table` and `kv_indptr`, differ only in where a request's page ids start and in how
its length is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.fp8 import FP8, check_target
from ....primitives.paging import (
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MIN_HEAD_DIM,
    check_pool,
    debug_bounds,
    debug_pages,
)
from ....runtime import check
from ....runtime.language import tl, triton


class Lengths(NamedTuple):
    """Pointers to the op's arguments of these names: how many rows and keys requests have; None: not given."""

    qo_indptr: Any
    seq_lens: Any
    kv_indptr: Any
    last_page_len: Any
    plan: Any


@triton.jit
def request_pages(batch, request, is_live, PAGE_SIZE: tl.constexpr):
    """Returns where the page ids of a request start, how many there are, and how many slots are filled.

    It does so for one request or for several. batch: a `batch.Batch`. Requests that are not live have no page.
    """
    lengths = batch.lengths
    if lengths.kv_indptr is not None:
        length = tl.load(lengths.last_page_len + request, mask=is_live, other=0).to(tl.int64)
        first = tl.load(lengths.kv_indptr + request, mask=is_live, other=0).to(tl.int64)
        last = tl.load(lengths.kv_indptr + request + 1, mask=is_live, other=0).to(tl.int64)
        first = tl.minimum(tl.maximum(first, 0), batch.table_size)
        count = tl.maximum(tl.minimum(last, batch.table_size) - first, 0)
        length += (count - 1) * PAGE_SIZE
    else:
        length = tl.load(lengths.seq_lens + request, mask=is_live, other=0).to(tl.int64)
        first = request * batch.stride_page_table_request
        count = tl.where(is_live, batch.table_size, 0).to(tl.int64)
    length = tl.maximum(tl.minimum(length, count * PAGE_SIZE), 0)
    return first, count.to(tl.int32), length.to(tl.int32)


def check_cache(args: check.Arguments, dtype: torch.dtype, batch: str | int) -> None:
    """Checks k_cache and v_cache against the query's axes Hq and D, their scales, and the page table in either form.

    batch: the axis or number of requests.
    """
    values = args.values
    check_head_dim(args)
    check_pool(args, (dtype,) if dtype == torch.float32 else (dtype, *FP8, torch.int8))
    check_target(args.op, "k_cache", values["k_cache"])
    for name in ("k_scale", "v_scale"):
        scale = args.tensor(name, (None,), (torch.float32,), optional=True)
        if scale is not None and len(scale) not in (1, args.size("Hkv")):
            args.fail(name, f"have 1 or Hkv = {args.size('Hkv')} elements", len(scale))
    if (values["k_scale"] is None) != (values["v_scale"] is None):
        missing, given = ("k_scale", "v_scale")[:: 1 if values["k_scale"] is None else -1]
        args.fail(missing, f"be given with {given}", None)
    if values["k_scale"] is not None and len(values["k_scale"]) != len(values["v_scale"]):
        args.fail("v_scale", f"have {len(values['k_scale'])} elements like k_scale", len(values["v_scale"]))
    check_group(args)
    check_page_table(args, batch, "k_cache")


def check_page_table(args: check.Arguments, batch: str | int, cache: str) -> None:
    """Checks the page table, in either form, of a checked cache of this name."""
    values, page_size = args.values, args.size("page_size")
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        args.fail(cache, f"have a page size that is a power of two in 1..{MAX_PAGE_SIZE}", page_size)
    form = args.exactly_one("block_table", "kv_indptr")
    if form == "block_table":
        args.tensor("block_table", (batch, "max_pages"), check.INTEGER, contiguous=1)
        args.tensor("seq_lens", (batch,), check.INTEGER)
        table = "block_table"
        excluded = ("kv_indices", "last_page_len")
    else:
        num_requests = batch if isinstance(batch, int) else args.size(batch)
        args.tensor("kv_indptr", (num_requests + 1,), check.INTEGER)
        args.tensor("kv_indices", (None,), check.INTEGER)
        args.tensor("last_page_len", (num_requests,), check.INTEGER)
        table = "kv_indices"
        excluded = ("seq_lens",)
    num_slots = values[table].shape[-1] * page_size
    # a draft block, and the rest of a tile, come after them and are counted in int32
    if num_slots > 2**31 - 1024:
        args.fail(table, "name at most 2^31 - 1024 slots", num_slots)
    if values[table].numel() * page_size >= 2**35:
        args.fail(table, "name fewer than 2^35 slots in all", values[table].numel() * page_size)
    for name in excluded:
        if values[name] is not None:
            args.fail(name, f"not be given with {form}, the other form of a page table", "a tensor")


def debug_cache(args: check.Arguments, slots) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 what a checked page table holds, where it is read.

    slots: for the filled slots of each request, gives the first slot that is read, and the end of them, [B] int64 all.
    """
    if not check.DEBUG:
        return
    values, page_size, num_pages = args.values, args.size("page_size"), args.size("num_pages")

    def is_read(page, filled, request=slice(None)):
        first, stop = (slot[request] for slot in slots(filled.to(torch.int64)))
        return (page >= first // page_size) & (page * page_size < stop) & (first < stop)

    if values["block_table"] is not None:
        table, lengths = values["block_table"], values["seq_lens"]
        num_slots = table.shape[1] * page_size
        rule = f"lie in 0..{num_slots}, the slots of a row of block_table"
        args.debug("seq_lens", rule, lambda: (lengths >= 0) & (lengths <= num_slots))
        rule = f"leave room for the draft keys in the {num_slots} slots of a row of block_table"
        args.debug("seq_lens", rule, lambda: slots(lengths.to(torch.int64))[1] <= num_slots)
        page = torch.arange(table.shape[1], device=table.device)
        debug_pages(args, "block_table", num_pages, lambda: is_read(page[:, None], lengths).T)
        return
    bounds, table, last = values["kv_indptr"], values["kv_indices"], values["last_page_len"]
    debug_bounds(args, "kv_indptr", len(table))
    is_filled = lambda: (last >= 1) & (last <= page_size)  # noqa: E731
    args.debug("last_page_len", f"lie in 1..{page_size}", lambda: (bounds.diff() == 0) | is_filled())

    def is_read_of_all():
        entry = torch.arange(len(table), device=table.device)
        request = torch.searchsorted(bounds.to(torch.int64), entry, right=True) - 1
        is_owned = (request >= 0) & (request < len(last))
        request = torch.where(is_owned, request, 0)
        filled = ((bounds.diff() - 1) * page_size + last).clamp(min=0)
        return is_owned & is_read(entry - bounds[request], filled, request)

    if len(last):
        debug_pages(args, "kv_indices", num_pages, is_read_of_all)


def first_seen(position: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns the first slot that a row at each of these positions sees."""
    return torch.zeros_like(position) if window is None else (position + 1 - window).clamp(min=0)


def seen_by_prompts(values: dict, filled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first slot that each request's rows see, and the end of them; of no rows, no slots."""
    num_rows = values["qo_indptr"].diff().clamp(min=0)
    return first_seen(filled - num_rows, values["window"]), torch.where(num_rows > 0, filled, 0)


def check_head_dim(args: check.Arguments) -> None:
    """Checks the axis D, which the query has bound."""
    if not MIN_HEAD_DIM <= args.size("D") <= MAX_HEAD_DIM:
        args.fail("query", f"have D in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}", args.size("D"))


def check_group(args: check.Arguments) -> None:
    """Checks that heads come in groups."""
    num_heads, num_kv_heads = args.size("Hq"), args.size("Hkv")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        args.fail("query", f"have Hq that is a multiple of Hkv = {num_kv_heads}", num_heads)


def check_bounds(args: check.Arguments, num_rows: int) -> int:
    """Checks qo_indptr [B + 1], the bounds of every request's rows, and max_query; returns B."""
    bounds = args.tensor("qo_indptr", (None,), check.INTEGER)
    if len(bounds) == 0:
        args.fail("qo_indptr", "have at least one element", 0)
    debug_bounds(args, "qo_indptr", num_rows)
    most = args.values["max_query"]
    if check.can_read(bounds) and len(bounds) > 1 and (longest := int(bounds.diff().max())) > most:
        args.fail("qo_indptr", f"give no request more than max_query = {most} rows", longest)
    return len(bounds) - 1


def check_logits(args: check.Arguments) -> None:
    """Checks the arguments that change logits: sm_scale, soft_cap, window and sinks."""
    for name in ("sm_scale", "soft_cap"):
        value = args.values[name]
        if value is not None and not 0.0 < value < float("inf"):
            args.fail(name, "be a positive finite number or None", value)
    if args.values["window"] is not None:
        args.integer("window", 1, 2**31 - 1)
    args.tensor("sinks", ("Hq",), check.FLOAT, optional=True)


def check_plan(args: check.Arguments, batch_size: int) -> None:
    """Checks plan, which `plan_attention` made for this number of requests."""
    args.tensor("plan", (batch_size + 1,), (torch.int32,), optional=True)


def cache_arguments(key: torch.Tensor, value: torch.Tensor, table: torch.Tensor | None) -> dict:
    """Returns the launch arguments that describe checked keys and values, in pages of a table or in rows (None)."""
    head_dim, is_paged = key.shape[-1], table is not None
    stride_k, stride_v = key.stride(0) // head_dim, value.stride(0) // head_dim
    return {
        "stride_k_page": stride_k,
        "stride_v_page": None if stride_v == stride_k else stride_v,
        "stride_page_table_request": table.stride(0) if is_paged and table.dim() == 2 else 0,
        # a pool without pages has no slots
        "table_size": table.shape[-1] if is_paged and len(key) else 0,
        "num_pages": len(key),
    }
