"""SGLang's functions for the bookkeeping of KV slots, on top of our ops; for lists, see sglang_kv_indices.py.

    import eagle_kernels.integrations.sgl_kernel as sgl_kernel      # has the names of both files as well

Names, argument order, dtypes and written values are those of SGLang 0.5.23, or of an older version if a docstring
says so; SGLang is never imported. SGLang's Triton kernels are called like kernels here, too, `name[grid](...)`; sizes
that only a kernel needs (such as pool_len, bs_upper, BLOCK_SIZE) are accepted and ignored. Integers may be int32 or
int64 everywhere.

What differs                     SGLang                             here
    lists that do not fit        are written past the buffer        are cut at its end
    rows, columns out of range   are read                           give -1
    kv_indptr                    entry 0 is the caller's zero       written whole, by the lengths alone: `positions`
                                                                    and the bounds that a caller made are not read
    after the lists              as it was; what an op allocates    the same; what an op allocates ends with -1
                                 holds anything
    align_evict_mask             a request without a token keeps    keeps nothing: it has no page
                                 the slots of its first page

Refused, as not supported: tables of pages (ENTRY_PAGE_SIZE), translation of virtual slots (v2p), and
`mrope` positions.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import accepted_cache_locs, assign_req_to_token, draft_cache_locs, extend_cache_locs
from ..ops import align_evict_mask_to_page_size as _align_evict_mask_to_page_size
from ..ops.kv.accepted_cache_locs import Output as AcceptedOutput
from ..ops.kv.draft_cache_locs import Output as DraftLocsOutput
from ..ops.kv.extend_cache_locs import Output as ExtendOutput

__all__ = [
    "align_evict_mask_to_page_size", "assign_draft_cache_locs_contiguous_func", "assign_extend_cache_locs_func",
    "assign_extend_cache_locs_uniform_func", "assign_req_to_token_pool_func", "fill_accept_out_cache_loc_func",
    "fill_front_out_cache_loc_func", "get_src_tgt_cache_loc", "get_target_cache_loc",
]  # fmt: skip


class Kernel:
    """Makes a function callable like a Triton kernel; its first argument is the grid, a tuple."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: int | tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.__wrapped__, grid if isinstance(grid, tuple) else (grid,))


# rows of req_to_token


def assign_req_to_token_pool_func(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    batch_size: int,
) -> None:  # fmt: skip
    """Writes the packed slots out_cache_loc to columns start..end - 1 of the requests' rows."""
    assign_req_to_token(
        req_pool_indices[:batch_size], req_to_token, start_offset[:batch_size],
        end_offset[:batch_size], out_cache_loc.view(-1),
    )  # fmt: skip


def assign_extend_cache_locs_func(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor,
    batch_size: int, draft_token_num: int, device: torch.device | str,
) -> Tensor:  # fmt: skip
    """Returns the slots in columns start..end - 1, packed, as int64 [batch_size * draft_token_num]; then -1."""
    return extend_cache_locs(
        req_pool_indices[:batch_size], req_to_token, start_offset[:batch_size], end_offset[:batch_size],
        capacity=batch_size * draft_token_num,
    ).cache_locs  # fmt: skip


def assign_extend_cache_locs_uniform_func(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, batch_size: int, draft_token_num: int,
    device: torch.device | str, *, full_v2p: Tensor | None = None, swa_v2p: Tensor | None = None,
    full_out: Tensor | None = None, swa_out: Tensor | None = None, page_size: int = 1,
    positions_out: Tensor | None = None, anchor_src: Tensor | None = None, anchor_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the slots in draft_token_num columns from start on, as int64 [batch_size * draft_token_num].
    positions_out, if given, gets the columns; anchor_out[:, 0] gets anchor_src."""
    where = f"{__name__}.assign_extend_cache_locs_uniform_func"
    refuse_translation(where, 1, full_v2p is not None or swa_v2p is not None)
    size = batch_size * draft_token_num
    cache_locs = torch.empty(size, dtype=torch.int64, device=start_offset.device)
    positions = torch.empty_like(cache_locs) if positions_out is None else positions_out.view(-1)[:size]
    extend_cache_locs(
        req_pool_indices[:batch_size], req_to_token, start_offset[:batch_size], num_tokens=draft_token_num,
        out=ExtendOutput(scratch(cache_locs, batch_size + 1), cache_locs, positions, scratch(cache_locs, 1)),
    )  # fmt: skip
    if anchor_out is not None:
        anchor_out[:, 0].copy_(anchor_src.view(-1))
    return cache_locs


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor,
    topk: int, num_cols: int, positions: Tensor | None = None, mrope: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the slots of topk branches of num_cols steps to out_cache_loc [B * topk * num_cols], branch by branch.
    positions [B * topk], if given, gets the length that each branch starts from."""
    if mrope is not None:
        where = f"{__name__}.assign_draft_cache_locs_contiguous_func"
        raise ValueError(f"{where}: mrope must be None, got a tensor")
    batch_size = seq_lens.shape[0]
    num_branches = batch_size * topk
    if positions is None:
        positions = torch.empty(num_branches, dtype=torch.int64, device=seq_lens.device)
    out = DraftLocsOutput(
        cache_locs=out_cache_loc.view(-1)[: num_branches * num_cols].view(num_branches, num_cols),
        positions=positions.view(-1)[:num_branches],
        copy_indptr=scratch(seq_lens, batch_size + 1),
        source_locs=scratch(seq_lens, 0), target_locs=scratch(seq_lens, 0), overflow=scratch(seq_lens, 1),
    )  # fmt: skip
    draft_cache_locs(req_pool_indices[:batch_size], req_to_token, seq_lens, topk=topk, num_steps=num_cols, out=out)


# after verification


def fill_accept_out_cache_loc_func(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """Writes the slots that the first `size` entries of accept_index name, one after another; -1 names none."""
    # for our op all requests are one, whose nodes are numbered as here
    slots, target = out_cache_loc.view(-1), accept_out_cache_loc.view(-1)
    _list_accepted(slots, None, accept_index.view(1, -1)[:, :size], None, slots.numel(), source=target)


def fill_front_out_cache_loc_func(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """Writes the first num_front[i] slots of each request's share of out_cache_loc, one after another."""
    batch_size, front = num_front.numel(), front_out_cache_loc.view(-1)
    windows = out_cache_loc.view(batch_size, -1)
    extend_cache_locs(
        torch.arange(batch_size, device=windows.device), windows, torch.zeros_like(num_front), num_front,
        capacity=front.numel(), keep_unused=True,
        out=ExtendOutput(scratch(front, batch_size + 1), front, torch.empty_like(front), scratch(front, 1)),
    )  # fmt: skip


def get_src_tgt_cache_loc(
    seq_lens: Tensor, out_cache_loc: Tensor, accept_index: Tensor, accept_length: Tensor,
    draft_token_num: int, page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the slots of the path, a zero for each, and how many slots of each request are free (SGLang 0.5.10).
    accept_index names the path's nodes only, accept_length counts accepted drafts. SGLang calls the same torch
    operators; `accepted_cache_locs` does this and `get_target_cache_loc`'s work in one launch."""
    src_cache_loc = out_cache_loc[accept_index]
    extended = seq_lens + draft_token_num
    kept = (seq_lens + accept_length + 1 + page_size - 1) // page_size * page_size
    return src_cache_loc, torch.zeros_like(src_cache_loc), extended - torch.minimum(kept, extended)


@Kernel
def get_target_cache_loc(
    grid: tuple[int, ...], tgt_cache_loc: Tensor, to_free_slots: Tensor, accept_length: Tensor,
    to_free_num_slots: Tensor, out_cache_loc: Tensor,
    num_verify_tokens: int, num_verify_tokens_upper: int, bs_upper: int,
) -> None:  # fmt: skip
    """Writes the first accept_length + 1 slots of each request to tgt_cache_loc, its last ones to to_free_slots.
    grid (B,); accept_length counts accepted drafts, to_free_num_slots says how many of the last ones."""
    batch_size = grid[0]
    _list_accepted(
        out_cache_loc.view(-1)[: batch_size * num_verify_tokens], accept_length[:batch_size], None,
        to_free_num_slots[:batch_size], num_verify_tokens, target=tgt_cache_loc.view(-1), free=to_free_slots.view(-1),
    )  # fmt: skip


@Kernel
def align_evict_mask_to_page_size(
    grid: tuple[int, ...], seq_lens: Tensor, evict_mask: Tensor, page_size: int, num_draft_tokens: int, BLOCK_SIZE: int
) -> None:
    """Clears in evict_mask [B * num_draft_tokens] the marks of each request's partly used page; grid (B,)."""
    batch_size = grid[0]
    mask = evict_mask.view(-1)[: batch_size * num_draft_tokens].view(batch_size, num_draft_tokens)
    _align_evict_mask_to_page_size(seq_lens[:batch_size], mask, page_size=page_size)


def _list_accepted(slots, accepted, paths, num_free, num_nodes, *, source=None, target=None, free=None) -> None:
    """Calls accepted_cache_locs with the lists that the caller has, and with scratch for the others."""
    wanted = source if target is None else target
    batch_size = 1 if accepted is None else accepted.shape[0]
    if num_nodes == 0:
        return
    out = AcceptedOutput(
        path_indptr=scratch(slots, batch_size + 1),
        source_locs=torch.empty_like(wanted) if source is None else source,
        target_locs=torch.empty_like(wanted) if target is None else target,
        free_indptr=scratch(slots, batch_size + 1),
        free_locs=scratch(slots, 0) if free is None else free,
        overflow=scratch(slots, 2),
    )
    accepted_cache_locs(
        slots, accepted, paths, free_token_num=num_free, num_verify_tokens=num_nodes, capacity=wanted.numel(),
        free_capacity=out.free_locs.numel(), keep_unused=True, out=out,
    )  # fmt: skip


def scratch(like: Tensor, size: int) -> Tensor:
    """Allocates an output of our ops that SGLang's do not have."""
    return torch.empty(size, dtype=torch.int32, device=like.device)


def refuse_translation(where: str, entry_page_size: int, is_translated: bool) -> None:
    """Raises ValueError for what `where`, a function's whole name, does not support: pages and virtual slots."""
    if entry_page_size != 1:
        raise ValueError(
            f"{where}: ENTRY_PAGE_SIZE must be 1, since tables of pages are not supported, got {entry_page_size}"
        )
    if is_translated:
        raise ValueError(f"{where}: a table that translates slots must not be given, as that is not supported")
