"""Moves the KV rows of accepted nodes to the front of the verified block, in place, in all layers at once.

Layers lie in one pool, or their caches lie anywhere in memory: then a program looks its cache up in a table of
addresses, and all else is the same.

Computes: For every depth d of the accepted path, the root included, the row at slot seq_len + (accept_index[b, d] - b *
    N) moves to slot seq_len + d, in keys and values of every layer.
Invariants: Nothing outside a request's slots seq_len..seq_len + W - 1, for W entries of a path, is written. There are
    no races: no two programs touch the same column of a request's rows, and a program walks up the depths in one fixed
    1-D layout, so each thread reads and writes only its own columns, in program order. Along an ascending path source
    >= destination, so a row that depth d overwrites was read at an earlier depth or is not on the path. A path that
    does not ascend moves the same way, depth by depth.
Grid: (B, 2 * L, column blocks) for B requests and L layers, one program moves one range of columns of the keys or
    values of one layer and request.
Launches: 1
Traffic: 2 * L * row bytes * 2 per moved row; with addresses 8 bytes more a program.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import check_pool, debug_pages, slot_strides
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.paths import debug_paths

MUTATES = ("k_cache", "v_cache")

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2,
                torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8, torch.int8)  # fmt: skip

# block_bytes: what a program moves of one slot, 16 a thread.
TUNING = {"default": {"block_bytes": 2048, "num_warps": 4}}


class Table(NamedTuple):
    """The page ids of one request."""

    row_ptr: Any
    width: Any  # how many there are
    num_pages: Any  # of the pool


class Inputs(NamedTuple):
    """Pointers to the op's arguments of these names."""

    block_table: Any
    seq_lens: Any
    accept_index: Any
    accept_token_num: Any


class Path(NamedTuple):
    """The accepted path of one request."""

    request: Any  # int64
    inputs: Any
    num_depths: Any  # columns of accept_index
    num_nodes: Any  # of the request's tree


class Shape(NamedTuple):
    """The constants of a call; strides count heads."""

    PAGE_SIZE: int
    STRIDE_TOKEN: int
    STRIDE_HEAD: int
    NUM_HEADS: int  # of a slot; 1: a slot's heads lie together and are moved as one
    HEAD_BYTES: int


@triton.jit(
    do_not_specialize=["num_pages", "table_width", "num_depths", "num_verify_tokens", "stride_k_layer",
                       "stride_k_page", "stride_v_layer", "stride_v_page", "stride_block_table_request"]
)  # fmt: skip
def _move_accepted_kv_kernel(
    k_cache_ptr, v_cache_ptr, cache_addresses_ptr, inputs,
    num_pages, table_width, num_depths, num_verify_tokens, stride_k_layer, stride_k_page, stride_v_layer, stride_v_page,
    stride_block_table_request,
    SHAPE: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_COLUMN: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) // 2).to(tl.int64)
    column = tl.program_id(2) * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
    if cache_addresses_ptr is not None:
        # the strides of layers are 0
        place = tl.program_id(1) % 2 * (tl.num_programs(1) // 2) + layer
        address = tl.maximum(tl.load(cache_addresses_ptr + place), 0)
        num_pages = tl.where(address > 0, num_pages, 0)
        # what is said of the number itself does not reach the pointer
        k_cache_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGNMENT)
        v_cache_ptr = k_cache_ptr
    path = Path(request, inputs, num_depths, num_verify_tokens)
    table = Table(inputs.block_table + request * stride_block_table_request, table_width, num_pages)
    # two calls rather than a choice of pointers, which would lose what is known about their alignment
    if tl.program_id(1) % 2 == 0:
        _move_path(path, table, k_cache_ptr, layer * stride_k_layer, stride_k_page, column, SHAPE)
    else:
        _move_path(path, table, v_cache_ptr, layer * stride_v_layer, stride_v_page, column, SHAPE)


@triton.jit
def _find_pages(table, slot, is_wanted, PAGE_SIZE: tl.constexpr):
    """Returns (page ids int64, whether the slots exist) for slots of a request, one or several."""
    index = slot // PAGE_SIZE
    is_wanted = is_wanted & (slot >= 0) & (index < table.width)
    page = tl.load(table.row_ptr + index, mask=is_wanted, other=-1).to(tl.int64)
    return page, is_wanted & (page >= 0) & (page < table.num_pages)


@triton.jit
def _move_path(path, table, cache_ptr, first_head, stride_page, column, SHAPE: tl.constexpr):
    """Moves these columns of a path's rows, bytes of their heads, depth by depth.
    first_head and stride_page count heads of HEAD_BYTES."""
    HEAD_BYTES: tl.constexpr = SHAPE.HEAD_BYTES
    place = column
    if SHAPE.NUM_HEADS > 1:
        place = (column // HEAD_BYTES).to(tl.int64) * (SHAPE.STRIDE_HEAD * HEAD_BYTES) + column % HEAD_BYTES
    seq_len = tl.load(path.inputs.seq_lens + path.request).to(tl.int64)
    accepted = tl.load(path.inputs.accept_token_num + path.request).to(tl.int64)
    for depth in range(0, tl.minimum(accepted + 1, path.num_depths)):
        index = tl.load(path.inputs.accept_index + path.request * path.num_depths + depth).to(tl.int64)
        node = index - path.request * path.num_nodes
        is_moved = (node >= 0) & (node < path.num_nodes) & (node != depth)
        source = seq_len + node
        destination = seq_len + depth
        source_page, source_exists = _find_pages(table, source, is_moved, SHAPE.PAGE_SIZE)
        destination_page, destination_exists = _find_pages(table, destination, is_moved, SHAPE.PAGE_SIZE)
        in_bounds = (column < SHAPE.NUM_HEADS * HEAD_BYTES) & source_exists & destination_exists
        source_head = first_head + source_page * stride_page + source % SHAPE.PAGE_SIZE * SHAPE.STRIDE_TOKEN
        destination_head = (
            first_head + destination_page * stride_page + destination % SHAPE.PAGE_SIZE * SHAPE.STRIDE_TOKEN
        )
        value = tl.load(cache_ptr + source_head * HEAD_BYTES + place, mask=in_bounds)
        tl.store(cache_ptr + destination_head * HEAD_BYTES + place, value, mask=in_bounds)


def contract(values: dict) -> None:
    args = check.Arguments("move_accepted_kv", values)
    args.integer("num_verify_tokens", 1)
    check_pool(args, CACHE_DTYPES, ("L",), most_rows=math.inf)
    if args.size("Hkv") == 0:
        args.fail("k_cache", "have at least one KV head", list(values["k_cache"].shape))
    if args.size("page_size") < 1:
        args.fail("k_cache", "have a page size of at least 1", args.size("page_size"))
    args.tensor("block_table", ("B", "M"), check.INTEGER, contiguous=1)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.tensor("accept_index", ("B", "S + 1"), check.INTEGER)
    args.tensor("accept_token_num", ("B",), check.INTEGER)
    if args.tensor("cache_addresses", (2, "C"), (torch.int64,), optional=True) is not None:
        if args.size("L") != 1:
            args.fail("k_cache", "have one layer beside cache_addresses", list(values["k_cache"].shape))
        if isinstance(values, check.OfReference) and args.device.type != "cpu":
            args.fail("cache_addresses", "be None for the reference, which reads those of the CPU alone", args.device)
        _debug_addresses(args)
    _debug_values(args)


def _debug_addresses(args: check.Arguments) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 that addresses are as aligned as the kernel takes them for, and occur once."""
    addresses = args.values["cache_addresses"]
    if not check.can_read(addresses):
        return
    step = _alignment(args.values["k_cache"], args.values["v_cache"])
    args.debug("cache_addresses", f"be multiples of {step}, like those of the caches", lambda: addresses % step == 0)
    flat = addresses.flatten()
    is_again = (flat[:, None] == flat).tril(-1).any(1) & (flat > 0)
    args.debug("cache_addresses", "name no cache twice", lambda: ~is_again.view(addresses.shape))


def _alignment(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Returns what the compiler is told of addresses, 16 or 1: no more than plans of launches compare."""
    return 1 if (k_cache.data_ptr() | v_cache.data_ptr()) % 16 else 16


def _debug_values(args: check.Arguments) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 lengths and page ids of requests that move something."""
    if not check.DEBUG:
        return
    values, page_size, num_pages = args.values, args.size("page_size"), args.size("num_pages")
    table, seq_lens, path, num_drafts = (
        values[name] for name in ("block_table", "seq_lens", "accept_index", "accept_token_num")
    )
    width, num_slots = path.shape[1], table.shape[1] * page_size
    if not check.can_read(table):
        return
    depth, request = (torch.arange(size, device=path.device) for size in (width, len(path)))
    debug_paths(args, values["num_verify_tokens"])
    node = path - request[:, None] * values["num_verify_tokens"]
    is_moved = (depth <= num_drafts[:, None]) & (node >= 0) & (node < values["num_verify_tokens"])
    is_moved &= (seq_lens != 0)[:, None]  # it may be a row that pads the batch
    # the slots of a request from which and to which rows are copied, none of which is before the prefix's end
    places = torch.stack([node, depth.expand_as(node)]).to(torch.int64)
    used = torch.where(is_moved[None], seq_lens[:, None].clamp(max=check.MAX_INT32) + places, -1)
    is_live = is_moved.any(1)
    rule = f"leave room for the accepted nodes in the {num_slots} slots of a row of block_table"
    args.debug("seq_lens", "not be negative", lambda: (seq_lens >= 0) | ~is_live)
    args.debug("seq_lens", rule, lambda: (used < num_slots).all(2).all(0))

    page = torch.arange(table.shape[1], device=table.device)
    debug_pages(args, "block_table", num_pages, lambda: (used[..., None] // page_size == page).any(2).any(0))


@launcher
def move_accepted_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    *,
    num_verify_tokens: int,
    cache_addresses: torch.Tensor | None = None,
) -> None:
    """Moves the cached keys and values of accepted nodes so that each path is contiguous, in place, in all layers.

    Node i of a request is at slot seq_len + i; slot t is on the request's page t // page_size.

    Layers whose caches are separate tensors move in one launch too, by a table of their addresses, which
    `eagle_kernels.cache_addresses` makes once, before CUDA graphs are captured. The table keeps no cache alive: the
    caller does, as long as calls and graphs use it. Layers that differ in shape, strides, dtype or block table need a
    table and a call of their own.

    Args:
        k_cache, v_cache: [L, num_pages, page_size, Hkv, D] fp16, bf16, fp32, fp8 (float8_e4m3fn, float8_e5m2 or their
            fnuz forms), uint8 or int8, in place; L layers. Both of one shape and dtype; page_size is at least 1. All
            axes but the last may be strided by multiples of D, slots and heads of both caches alike.
        block_table: [B, max_pages] int. Page ids of each request. Rows may be strided.
        seq_lens: [B] int. Committed tokens before this step.
        accept_index: [B, W] int. Nodes of each path, root first, as b * N + node; -1 padded.
        accept_token_num: [B] int. Accepted drafts, without the root and the bonus: one more entry is moved. Negative
            for a dead request.
        num_verify_tokens: N, nodes of a tree, at least 1.
        cache_addresses: [2, C] int64. Addresses of C caches of keys, then of C caches of values, each once. All have
            the shape, strides, dtype and alignment of k_cache and v_cache, which then have L = 1 and move only if they
            are listed. An address below 1: no cache; a wrong one: foreign memory is written. torch.compile sees only
            k_cache and v_cache change.

    Returns:
        None. The rows of a path's entry d are copied bit for bit to slot seq_len + d, one entry after another. Entries
        outside the request's N nodes, slots past the block table and page ids outside the pool are skipped. Nothing
        checks that requests write different pages.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses an accept_token_num of W or more, accepted nodes outside the request's tree
        or its slots, pages outside the pool, negative seq_lens, and addresses that are not aligned as the caches are or
        occur twice. Rows that are -1 throughout and requests without a prefix may pad the batch.

    Source:
        SGLang's move_accept_tokens_to_target_kvcache, which moves by lists of slots.

    Example:
        >>> k_cache = torch.arange(4.0).view(1, 1, 4, 1, 1)  # slot t holds t
        >>> v_cache = k_cache + 10
        >>> eagle_kernels.move_accepted_kv(
        ...     k_cache, v_cache, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[0, 2]]), torch.tensor([1]),
        ...     num_verify_tokens=3)
        >>> k_cache.flatten().tolist()  # node 2, at slot 3, is now at slot 2 as well
        [0.0, 1.0, 3.0, 3.0]
    """
    contract(locals())
    num_layers, num_pages, page_size, num_heads, head_dim = k_cache.shape
    strides = [
        cache.stride(axis) if cache.shape[axis] > 1 else 0 for cache in (k_cache, v_cache) for axis in (0, 1)
    ]  # of layers and pages
    stride_token, stride_head = slot_strides(k_cache)
    if stride_head == 1 and not any(stride % (num_heads * head_dim) for stride in (*strides, stride_token * head_dim)):
        stride_token //= num_heads
        num_heads, head_dim = 1, num_heads * head_dim
    row_bytes = num_heads * head_dim * k_cache.element_size()
    tuned = dict(tuning.row(TUNING, k_cache.device))
    block_column = min(next_power_of_2(row_bytes), tuned.pop("block_bytes"))
    alignment = 1
    if cache_addresses is not None:
        num_layers, alignment = cache_addresses.shape[1], _alignment(k_cache, v_cache)
    launch(
        "move_accepted_kv", _move_accepted_kv_kernel,
        (block_table.shape[0], 2 * num_layers, -(-row_bytes // block_column)),
        k_cache_ptr=k_cache.view(torch.uint8), v_cache_ptr=v_cache.view(torch.uint8),
        cache_addresses_ptr=cache_addresses,
        inputs=Inputs(block_table, seq_lens, accept_index, accept_token_num), num_pages=num_pages,
        table_width=block_table.shape[1], num_depths=accept_index.shape[1], num_verify_tokens=num_verify_tokens,
        stride_k_layer=strides[0] // head_dim, stride_k_page=strides[1] // head_dim,
        stride_v_layer=strides[2] // head_dim, stride_v_page=strides[3] // head_dim,
        stride_block_table_request=block_table.stride(0),
        SHAPE=Shape(page_size, stride_token, stride_head, num_heads, head_dim * k_cache.element_size()),
        ALIGNMENT=alignment, BLOCK_COLUMN=block_column, **tuned,
    )  # fmt: skip
