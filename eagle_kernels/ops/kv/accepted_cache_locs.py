"""Lists the slots to copy so that accepted paths become contiguous, and the slots that become free, after verification.

Computes: Node i of request b, one of N, was verified at slot cache_locs[b * N + i]. The nodes of the path, root first,
    move to the first of the request's N slots: source_locs lists the slots of the path, target_locs those at the front.
Invariants: Nothing is written past a capacity, and no bound exceeds it. No target is free, unless free_token_num says
    so. Along an ascending path a slot is copied from, if at all, no later than it is copied to.
Grid: (max(B, 1),) for B requests, one program lists what belongs to one request and its share of the unused tails.
Launches: 1
Traffic: per request 4 W + 8 N + 16 bytes read, for W entries of accept_index; 16 capacity + 8 free_capacity + 8 (B + 2)
    written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, check_keep_unused, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.paths import debug_paths


class Output(NamedTuple):
    """What `accepted_cache_locs` returns."""

    path_indptr: torch.Tensor
    source_locs: torch.Tensor
    target_locs: torch.Tensor
    free_indptr: torch.Tensor
    free_locs: torch.Tensor
    overflow: torch.Tensor


# A program lists what belongs to a request, BLOCK_ENTRY entries at a time.
TUNING = {"default": {"BLOCK_ENTRY": 256, "num_warps": 2}}


class Inputs(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    cache_locs: Any
    accept_token_num: Any
    accept_index: Any
    seq_lens: Any
    free_token_num: Any


class Paths(NamedTuple):
    """The accepted paths of all requests."""

    inputs: Any
    width: Any  # the most nodes of a path
    num_nodes: Any  # of each request's tree


@triton.jit
def _read_path(paths, request, depth, is_wanted):
    """Returns the nodes int32 at these depths of the paths of one or several requests, -1 for none."""
    if paths.inputs.accept_index is None:
        node = (depth + request * 0).to(tl.int64)
    else:
        index = tl.load(paths.inputs.accept_index + request * paths.width + depth, mask=is_wanted, other=-1)
        node = index.to(tl.int64) - request * paths.num_nodes
    is_node = is_wanted & (node >= 0) & (node < paths.num_nodes)
    if paths.inputs.accept_token_num is not None:
        accepted = tl.load(paths.inputs.accept_token_num + request, mask=is_wanted, other=-1)
        is_node &= depth <= accepted
    return tl.where(is_node, node, -1).to(tl.int32)


@triton.jit
def _count_free(paths, request, is_wanted, PAGE_SIZE: tl.constexpr):
    """Returns how many int32 of the last slots of one or several requests are free."""
    inputs = paths.inputs
    has_root = is_wanted & (paths.width > 0)
    root = _read_path(paths, request, 0, has_root)
    if inputs.free_token_num is not None:
        count = tl.minimum(read_lengths(inputs.free_token_num, request, is_wanted), paths.num_nodes)
    elif inputs.seq_lens is not None:
        seq_len = read_lengths(inputs.seq_lens, request, is_wanted)
        length = seq_len + read_lengths(inputs.accept_token_num, request, is_wanted) + 1
        kept = (length + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE - seq_len
        count = tl.maximum(paths.num_nodes - kept, 0)
    else:
        count = (request * 0).to(tl.int64)
    return tl.where(root >= 0, count, 0).to(tl.int32)


@triton.jit(do_not_specialize=["batch_size", "path_width", "num_verify_tokens", "capacity", "free_capacity"])
def _accepted_cache_locs_kernel(
    inputs, out,
    batch_size, path_width, num_verify_tokens, capacity, free_capacity,
    PAGE_SIZE: tl.constexpr, KEEPS_UNUSED: tl.constexpr, BLOCK_ENTRY: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    # `contract` ensures that int32 is enough for all entries and slots; divisions of int64 would take longer than
    # all the rest
    own = tl.program_id(0)
    num_requests = tl.num_programs(0)
    is_live = own < batch_size  # an empty batch has one program, for its bounds and tails
    entry = tl.arange(0, BLOCK_ENTRY)
    paths = Paths(inputs, path_width, num_verify_tokens)

    # the request's lists begin after those of the requests before it: count their path nodes and free slots, and all
    path_before = tl.zeros([BLOCK_ENTRY], tl.int32)
    path_total = tl.zeros([BLOCK_ENTRY], tl.int32)
    for start in range(0, batch_size * path_width, BLOCK_ENTRY):
        place = start + entry
        request = place // path_width
        node = _read_path(paths, request, place - request * path_width, place < batch_size * path_width)
        is_node = (node >= 0).to(tl.int32)
        path_before += tl.where(request < own, is_node, 0)
        path_total += is_node
    free_before = tl.zeros([BLOCK_ENTRY], tl.int32)
    free_total = tl.zeros([BLOCK_ENTRY], tl.int32)
    for start in range(0, batch_size, BLOCK_ENTRY):
        request = start + entry
        counts = _count_free(paths, request, request < batch_size, PAGE_SIZE)
        free_before += tl.where(request < own, counts, 0)
        free_total += counts
    num_free = _count_free(paths, own, is_live, PAGE_SIZE)
    path_begin, all_paths = tl.sum(path_before), tl.sum(path_total)
    free_begin, all_free = tl.sum(free_before), tl.sum(free_total)

    # the path: its slots, and the same number from the front of the request's
    own_locs_ptr = inputs.cache_locs + own * num_verify_tokens
    num_own = tl.zeros([], tl.int32)
    for start in range(0, tl.where(is_live, path_width, 0), BLOCK_ENTRY):
        depth = start + entry
        node = _read_path(paths, own + entry * 0, depth, depth < path_width)
        is_node = node >= 0
        rank = num_own + tl.cumsum(is_node.to(tl.int32), 0) - 1
        source = tl.load(own_locs_ptr + node, mask=is_node, other=-1).to(tl.int64)
        target = tl.load(own_locs_ptr + rank, mask=is_node & (rank < num_verify_tokens), other=-1).to(tl.int64)
        exists = (source >= 0) & (target >= 0)
        place = path_begin + rank
        in_bounds = is_node & (place < capacity)
        tl.store(out.source_locs + place, tl.where(exists, source, -1), mask=in_bounds)
        tl.store(out.target_locs + place, tl.where(exists, target, -1), mask=in_bounds)
        num_own += tl.sum(is_node.to(tl.int32))

    # free slots: the last ones of the request
    for start in range(0, num_free, BLOCK_ENTRY):
        is_free = start + entry < num_free
        slot = tl.load(own_locs_ptr + num_verify_tokens - num_free + start + entry, mask=is_free, other=-1)
        place = free_begin + start + entry
        tl.store(out.free_locs + place, tl.maximum(slot, -1), mask=is_free & (place < free_capacity))

    if not KEEPS_UNUSED:
        fill_unused(out.source_locs, all_paths, capacity, own, num_requests, -1, BLOCK_ENTRY)
        fill_unused(out.target_locs, all_paths, capacity, own, num_requests, -1, BLOCK_ENTRY)
        fill_unused(out.free_locs, all_free, free_capacity, own, num_requests, -1, BLOCK_ENTRY)
    tl.store(out.path_indptr + own + 1, tl.minimum(path_begin + num_own, capacity), mask=is_live)
    tl.store(out.free_indptr + own + 1, tl.minimum(free_begin + num_free, free_capacity), mask=is_live)
    if own == 0:
        tl.store(out.path_indptr, 0)
        tl.store(out.free_indptr, 0)
        store_overflow(out.overflow, all_paths, capacity)
        store_overflow(out.overflow + 1, all_free, free_capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("accepted_cache_locs", values)
    num_nodes = args.integer("num_verify_tokens", 1, check.MAX_INT32)
    args.integer("page_size", 1)
    check_keep_unused(args)
    cache_locs = args.tensor("cache_locs", (None,), check.INTEGER)
    accept_token_num = args.tensor("accept_token_num", ("B",), check.INTEGER, optional=True)
    accept_index = args.tensor("accept_index", ("B", "W"), check.INTEGER, optional=True)
    if accept_token_num is None and accept_index is None:
        args.fail("at least one of accept_token_num and accept_index", "be given", "none of them")
    batch_size = args.size("B")
    # the kernel counts in int32 up to one tile past the end
    most = check.MAX_INT32 - 1023
    if cache_locs.shape[0] > most:
        args.fail("cache_locs", f"hold at most {most} slots", cache_locs.shape[0])
    if accept_index is not None and accept_index.numel() > most:
        args.fail("accept_index", f"have at most {most} entries", accept_index.numel())
    if cache_locs.shape[0] != batch_size * num_nodes:
        args.fail("cache_locs", f"hold N slots for each of B = {batch_size} requests", list(cache_locs.shape))
    for name in ("seq_lens", "free_token_num"):
        args.tensor(name, ("B",), check.INTEGER, optional=True)
    is_freed = values["seq_lens"] is not None or values["free_token_num"] is not None
    if values["seq_lens"] is not None:
        if values["free_token_num"] is not None:
            args.fail("free_token_num", "not be given with seq_lens, from which it follows", "a tensor")
        if accept_token_num is None:
            args.fail("seq_lens", "come with accept_token_num, which says how many slots are kept", "a tensor")
    _debug_values(args, cache_locs, num_nodes)
    capacity, free_capacity = values["capacity"], values["free_capacity"]
    if capacity is None:
        capacity = batch_size * (num_nodes if accept_index is None else args.size("W"))
    else:
        check_capacity(args)
    if free_capacity is None:
        free_capacity = batch_size * num_nodes if is_freed else 0
    else:
        check_capacity(args, "free_capacity")
    lists = [args.integers((room,), position, default=torch.int64)
             for room, position in ((capacity, 1), (capacity, 2), (free_capacity, 4))]  # fmt: skip
    if any(listed.dtype == torch.int32 for listed in lists):
        rule = "fit in int32, or out hold int64"
        args.debug("cache_locs", rule, lambda: cache_locs <= check.MAX_INT32, of_reference=True)
    indptr, (source, target, free) = args.spec((batch_size + 1,), torch.int32), lists
    return Output(indptr, source, target, indptr, free, args.spec((2,), torch.int32))


def _debug_values(args: check.Arguments, cache_locs: torch.Tensor, num_nodes: int) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 the lengths of live requests, and the slots of the nodes on their paths."""
    if not check.DEBUG:
        return
    num_drafts, path, seq_lens = (args.values[name] for name in ("accept_token_num", "accept_index", "seq_lens"))
    width = num_nodes if path is None else path.shape[1]
    debug_paths(args, num_nodes)
    if seq_lens is not None:
        args.debug("seq_lens", "not be negative", lambda: (seq_lens >= 0) | (num_drafts < 0))

    def holds():
        depth = torch.arange(width, device=cache_locs.device)
        first = torch.arange(args.size("B"), device=cache_locs.device)[:, None] * num_nodes
        is_on_path = True if num_drafts is None else depth <= num_drafts[:, None]
        node = depth.expand(len(first), -1) if path is None else path - first
        is_on_path = is_on_path & (node >= 0) & (node < num_nodes)
        is_read = torch.zeros_like(cache_locs, dtype=torch.bool)
        is_read[(first + node)[is_on_path]] = True
        return (cache_locs >= 0) | ~is_read

    args.debug("cache_locs", "hold slots of the pool where they are read", holds)


@launcher
def accepted_cache_locs(
    cache_locs: torch.Tensor,
    accept_token_num: torch.Tensor | None = None,
    accept_index: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    free_token_num: torch.Tensor | None = None,
    *,
    num_verify_tokens: int,
    page_size: int = 1,
    capacity: int | None = None,
    free_capacity: int | None = None,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists the slots to copy so that accepted paths become contiguous, and the slots that become free.

    The path of a request moves to the first of its N slots. A pool that moves nothing needs only `source_locs`.

    Args:
        cache_locs: [B * N] int. Slots of each request's tokens from seq_len on, its root's first; at most 2^31 - 1024
            in all. Slots below 0 count as -1.
        accept_token_num: None or [B] int. Accepted drafts, without the root and the bonus: the path has one more node.
            Negative for a dead request. None: `accept_index` gives the path.
        accept_index: None or [B, W] int, of at most 2^31 - 1024 entries. Nodes of each path, root first, as b * N +
            node; -1 padded. Entries outside the request's N nodes are left out. None: each tree is a chain, whose path
            is its first nodes (W = N); this needs `accept_token_num`.
        seq_lens: None or [B] int. Committed tokens before this step. With it, the slots on pages after that of the last
            accepted token are free: those of tokens from `ceil((seq_len + accept_token_num + 1) / P) * P` on. Needs
            `accept_token_num`. None: nothing is free.
        free_token_num: None or [B] int. Instead of `seq_lens`: how many of each request's last slots are free, clamped
            to 0..N.
        num_verify_tokens: N, nodes of a tree, at least 1.
        page_size: P, tokens of a page, at least 1.
        capacity: room for the slots of all paths. None: B * W, which is always enough.
        free_capacity: room for all free slots. None: B * N, which is always enough, or 0 where nothing is free.
        keep_unused: unused tails of the lists in `out` stay as they are.
        out: six tensors to write into.

    Returns:
        A named tuple, whose int64 is int32 where `out` holds int32:
        path_indptr: [B + 1] int32. Where each request's entries of the next two lists begin and end.
        source_locs: [capacity] int64. Slots of the paths, to copy from, -1 padded.
        target_locs: [capacity] int64. Slots to copy to, -1 padded. If one slot of a pair is -1, both are.
        free_indptr: [B + 1] int32. Where each request's entries of `free_locs` begin and end.
        free_locs: [free_capacity] int64. Free slots, -1 padded.
        overflow: [2] int32. The capacity that paths and free slots need if it exceeds theirs, where lists and bounds
            end; else 0.
        A dead request, whose entries are -1 or whose accept_token_num is negative, moves and frees nothing; one whose
        first entry is left out frees nothing. The pairs of an ascending path may be copied in order.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses an accept_token_num of W or more, accepted nodes outside the request's tree,
        negative seq_lens of live requests and negative slots of accepted nodes.

    Source:
        SGLang's fill_accept_out_cache_loc and fill_front_out_cache_loc (moves), get_src_tgt_cache_loc and
        get_target_cache_loc (free slots). Both in one launch, and chains, are eagle_kernels' own.

    Example:
        >>> listed = eagle_kernels.accepted_cache_locs(
        ...     torch.tensor([100, 101, 102, 103]), torch.tensor([1]), torch.tensor([[0, 2]]), torch.tensor([5]),
        ...     num_verify_tokens=4)
        >>> listed.source_locs.tolist(), listed.free_locs.tolist()  # nodes 0 and 2 move to slots 100 and 101
        ([100, 102], [102, 103, -1, -1])
    """
    values = locals()
    out = check.allocate("accepted_cache_locs", contract(values), out)
    batch_size = cache_locs.shape[0] // num_verify_tokens
    launch(
        "accepted_cache_locs", _accepted_cache_locs_kernel, (max(batch_size, 1),),
        inputs=bundle(Inputs, values), out=out, batch_size=batch_size,
        path_width=num_verify_tokens if accept_index is None else accept_index.shape[1],
        num_verify_tokens=num_verify_tokens, capacity=out.source_locs.shape[0], free_capacity=out.free_locs.shape[0],
        PAGE_SIZE=page_size, KEEPS_UNUSED=keep_unused, **tuning.row(TUNING, cache_locs.device),
    )  # fmt: skip
    return out
