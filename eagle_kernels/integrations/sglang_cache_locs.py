"""What SGLang 0.5.23 (and, where it says so, its older workers) uses to keep account of KV slots, on top of our ops.

    import eagle_kernels.integrations.sgl_kernel as sgl_kernel      # has these names as well

Names, argument order, dtypes and written values are SGLang's; nothing of it is imported. What is a Triton kernel there
is called here as one, `name[grid](...)`; sizes that only a kernel needs (pool_len, bs_upper, BLOCK_SIZE and their like)
are accepted and change nothing. int32 and int64 tensors do, wherever integers are asked for.

What differs                     SGLang                             here
    lists that do not fit        are written past the buffer        are cut at its end
    rows, columns out of range   are read                           give -1
    kv_indptr                    entry 0 is the caller's zero       written whole, by the lengths alone: `positions`
                                                                    and the bounds that a caller made are not read
    behind the lists             as it was; what an op allocates    the same; what an op allocates ends with -1
                                 holds anything
    align_evict_mask             a request without a token keeps    keeps nothing: it has no page
                                 the slots of its first page

Not here, and refused with the reason: tables of pages (ENTRY_PAGE_SIZE), and translation of virtual slots on the way
(v2p). `mrope` positions neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..ops import (
    accepted_cache_locs,
    assign_req_to_token,
    chain_kv_indices,
    draft_cache_locs,
    draft_kv_indices,
    extend_cache_locs,
    kv_indices,
)
from ..ops import align_evict_mask_to_page_size as _align_evict_mask_to_page_size
from ..ops.kv.accepted_cache_locs import Output as AcceptedOutput
from ..ops.kv.chain_kv_indices import Output as ChainOutput
from ..ops.kv.draft_cache_locs import Output as DraftLocsOutput
from ..ops.kv.draft_kv_indices import Output as DraftIndicesOutput
from ..ops.kv.extend_cache_locs import Output as ExtendOutput
from ..ops.kv.kv_indices import Output as IndicesOutput


class Kernel:
    """A function that is called as a Triton kernel is; it gets the grid, a tuple, as its first argument."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: int | tuple[int, ...]) -> Callable:
        return functools.partial(self.__wrapped__, grid if isinstance(grid, tuple) else (grid,))


# lists for attention


@Kernel
def generate_draft_decode_kv_indices(
    grid: tuple[int, ...],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    positions: torch.Tensor,
    row_stride: int,
    kv_indices_stride: int,
    kv_indptr_stride: int,
    bs_upper: int,
    iter_upper: int,
    num_tokens_upper: int,
    page_size: int,
    window_size: int = 0,
    sink_size: int = 0,
    NUM_STEPS: int = 0,
    ENTRY_PAGE_SIZE: int = 1,
    v2p: torch.Tensor | None = None,
    TRANSLATE: bool = False,
) -> None:
    """Writes kv_indices [N, *] and kv_indptr [N, *] of N draft steps; grid (N, B, K), or (N * blocks, B, K).

    N is NUM_STEPS where that is given. `draft_kv_indices` says what is written. Without a window sink_size means
    nothing, as there.
    """
    _refuse_translation("generate_draft_decode_kv_indices", ENTRY_PAGE_SIZE, TRANSLATE)
    _list_draft_steps(
        (NUM_STEPS or grid[0], *grid[1:]), req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr,
        page_size=page_size, window_size=window_size, sink_size=sink_size if window_size > 0 else 0,
    )  # fmt: skip


@Kernel
def generate_draft_decode_window_kv_indices(
    grid: tuple[int, ...],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    window_kv_indices: torch.Tensor,
    window_kv_indptr: torch.Tensor,
    positions: torch.Tensor,
    row_stride: int,
    kv_indices_stride: int,
    kv_indptr_stride: int,
    bs_upper: int,
    iter_upper: int,
    num_tokens_upper: int,
    page_size: int,
    window: int,
    ENTRY_PAGE_SIZE: int = 1,
    v2p: torch.Tensor | None = None,
    TRANSLATE: bool = False,
) -> None:
    """The same, clipped at every step to the last `window` tokens of prefix and drafts; grid (N, B, K)."""
    _refuse_translation("generate_draft_decode_window_kv_indices", ENTRY_PAGE_SIZE, TRANSLATE)
    _list_draft_steps(
        grid, req_pool_indices, req_to_token, paged_kernel_lens, window_kv_indices, window_kv_indptr,
        page_size=page_size, window_size=window, window_counts_drafts=True,
    )  # fmt: skip


@Kernel
def create_flashinfer_kv_indices_triton(
    grid: tuple[int, ...],
    req_to_token_ptr: torch.Tensor,
    req_pool_indices_ptr: torch.Tensor,
    page_kernel_lens_ptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_start_idx: torch.Tensor | None,
    kv_indices_ptr: torch.Tensor,
    req_to_token_ptr_stride: int,
    ENTRY_PAGE_SIZE: int = 1,
    TOKEN_BLOCK_PARALLEL: bool = False,
    token_mapping: torch.Tensor | None = None,
) -> None:
    """Writes the slots of every request, one after another, to kv_indices; grid (B,) or (B, blocks).

    kv_indptr [B + 1] is the running sum of the lengths, as all callers make it; it is written once more.
    """
    op, batch_size = "create_flashinfer_kv_indices_triton", grid[0]
    _refuse_translation(op, ENTRY_PAGE_SIZE, token_mapping is not None)
    kv_indices(
        req_pool_indices_ptr[:batch_size],
        req_to_token_ptr,
        page_kernel_lens_ptr[:batch_size],
        None if kv_start_idx is None else kv_start_idx[:batch_size],
        capacity=kv_indices_ptr.numel(),
        keep_unused=True,
        out=IndicesOutput(
            kv_indptr[: batch_size + 1],
            kv_indices_ptr.view(-1),
            _scratch(kv_indptr, batch_size),
            _scratch(kv_indptr, 1),
        ),
    )


@Kernel
def create_draft_kv_indices(
    grid: tuple[int, ...],
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    req_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    expand_factor: int,
    row_stride: int,
    num_tokens_upper: int,
) -> None:
    """Of the proposed naive EAGLE: one list for each of the last expand_factor tokens of a request; grid (B,).

    expand_factor is 2 there and any number here. `chain_kv_indices` says what is written.
    """
    batch_size = grid[0]
    chain_kv_indices(
        req_pool[:batch_size],
        req_to_token,
        seq_lens[:batch_size],
        num_verify_tokens=expand_factor,
        capacity=kv_indices.numel(),
        keep_unused=True,
        out=ChainOutput(
            kv_indptr[: batch_size * expand_factor + 1], kv_indices.view(-1), _scratch(kv_indptr, 1)
        ),
    )  # fmt: skip


# rows of req_to_token


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes the packed slots out_cache_loc to columns start..end - 1 of the requests' rows."""
    assign_req_to_token(
        req_pool_indices[:batch_size],
        req_to_token,
        start_offset[:batch_size],
        end_offset[:batch_size],
        out_cache_loc.view(-1),
    )


def assign_extend_cache_locs_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """The slots in columns start..end - 1, packed, as int64 [batch_size * draft_token_num]; -1 behind them."""
    return extend_cache_locs(
        req_pool_indices[:batch_size],
        req_to_token,
        start_offset[:batch_size],
        end_offset[:batch_size],
        capacity=batch_size * draft_token_num,
    ).cache_locs


def assign_extend_cache_locs_uniform_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
    *,
    full_v2p: torch.Tensor | None = None,
    swa_v2p: torch.Tensor | None = None,
    full_out: torch.Tensor | None = None,
    swa_out: torch.Tensor | None = None,
    page_size: int = 1,
    positions_out: torch.Tensor | None = None,
    anchor_src: torch.Tensor | None = None,
    anchor_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots in draft_token_num columns from start on, as int64 [batch_size * draft_token_num].

    positions_out, if given, gets the columns; anchor_out[:, 0] gets anchor_src.
    """
    op = "assign_extend_cache_locs_uniform_func"
    _refuse_translation(op, 1, full_v2p is not None or swa_v2p is not None)
    size = batch_size * draft_token_num
    cache_locs = torch.empty(size, dtype=torch.int64, device=start_offset.device)
    positions = torch.empty_like(cache_locs) if positions_out is None else positions_out.view(-1)[:size]
    extend_cache_locs(
        req_pool_indices[:batch_size],
        req_to_token,
        start_offset[:batch_size],
        num_tokens=draft_token_num,
        out=ExtendOutput(_scratch(cache_locs, batch_size + 1), cache_locs, positions, _scratch(cache_locs, 1)),
    )
    if anchor_out is not None:
        anchor_out[:, 0].copy_(anchor_src.view(-1))
    return cache_locs


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Writes the slots of topk branches of num_cols steps to out_cache_loc [B * topk * num_cols], branch by branch.

    positions [B * topk], if given, gets the length that each branch starts from.
    """
    op = "assign_draft_cache_locs_contiguous_func"
    if mrope is not None:
        raise ValueError(f"eagle_kernels.integrations.sglang_cache_locs.{op}: mrope must be None, got a tensor")
    num_branches = seq_lens.shape[0] * topk
    if positions is None:
        positions = torch.empty(num_branches, dtype=torch.int64, device=seq_lens.device)
    draft_cache_locs(
        req_pool_indices[: seq_lens.shape[0]],
        req_to_token,
        seq_lens,
        topk=topk,
        num_steps=num_cols,
        out=DraftLocsOutput(
            cache_locs=out_cache_loc.view(-1)[: num_branches * num_cols].view(num_branches, num_cols),
            positions=positions.view(-1)[:num_branches],
            copy_indptr=_scratch(seq_lens, seq_lens.shape[0] + 1),
            source_locs=_scratch(seq_lens, 0),
            target_locs=_scratch(seq_lens, 0),
            overflow=_scratch(seq_lens, 1),
        ),
    )


# after verification


def fill_accept_out_cache_loc_func(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Writes the slots that the first `size` entries of accept_index name, those of -1 left out, one after another."""
    # all requests are one to our op: its nodes are numbered through
    slots, target = out_cache_loc.view(-1), accept_out_cache_loc.view(-1)
    _list_accepted(slots, None, accept_index.view(1, -1)[:, :size], None, slots.numel(), source=target)


def fill_front_out_cache_loc_func(
    num_front: torch.Tensor,
    out_cache_loc: torch.Tensor,
    front_out_cache_loc: torch.Tensor,
) -> None:
    """Writes the first num_front[i] slots of each request's share of out_cache_loc, one after another."""
    batch_size, front = num_front.numel(), front_out_cache_loc.view(-1)
    windows = out_cache_loc.view(batch_size, -1)
    extend_cache_locs(
        torch.arange(batch_size, device=windows.device),
        windows,
        torch.zeros_like(num_front),
        num_front,
        capacity=front.numel(),
        keep_unused=True,
        out=ExtendOutput(_scratch(front, batch_size + 1), front, torch.empty_like(front), _scratch(front, 1)),
    )


def get_src_tgt_cache_loc(
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_length: torch.Tensor,
    draft_token_num: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of SGLang 0.5.10: slots of the path, room for as many (zeros), and how many slots of each request are free.

    accept_index names the path's nodes only, accept_length counts accepted drafts. These few operators of torch are
    what it is in SGLang; `accepted_cache_locs` does this and what `get_target_cache_loc` does in one launch.
    """
    src_cache_loc = out_cache_loc[accept_index]
    extended = seq_lens + draft_token_num
    kept = (seq_lens + accept_length + 1 + page_size - 1) // page_size * page_size
    return src_cache_loc, torch.zeros_like(src_cache_loc), extended - torch.minimum(kept, extended)


@Kernel
def get_target_cache_loc(
    grid: tuple[int, ...],
    tgt_cache_loc: torch.Tensor,
    to_free_slots: torch.Tensor,
    accept_length: torch.Tensor,
    to_free_num_slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_verify_tokens: int,
    num_verify_tokens_upper: int,
    bs_upper: int,
) -> None:
    """Writes the first accept_length + 1 slots of each request to tgt_cache_loc, its last ones to to_free_slots.

    grid (B,); accept_length counts accepted drafts, to_free_num_slots says how many of the last ones.
    """
    batch_size = grid[0]
    _list_accepted(
        out_cache_loc.view(-1)[: batch_size * num_verify_tokens], accept_length[:batch_size], None,
        to_free_num_slots[:batch_size], num_verify_tokens, target=tgt_cache_loc.view(-1), free=to_free_slots.view(-1),
    )  # fmt: skip


@Kernel
def align_evict_mask_to_page_size(
    grid: tuple[int, ...],
    seq_lens: torch.Tensor,
    evict_mask: torch.Tensor,
    page_size: int,
    num_draft_tokens: int,
    BLOCK_SIZE: int,
) -> None:
    """Clears the marks of each request's page in part in use in evict_mask [B * num_draft_tokens]; grid (B,)."""
    batch_size = grid[0]
    mask = evict_mask.view(-1)[: batch_size * num_draft_tokens].view(batch_size, num_draft_tokens)
    _align_evict_mask_to_page_size(seq_lens[:batch_size], mask, page_size=page_size)


# what several of them do


def _list_draft_steps(grid, req_pool_indices, req_to_token, lengths, indices, indptr, **options) -> None:
    """draft_kv_indices into the first rows and columns of the caller's matrices."""
    num_steps, batch_size, topk = grid
    draft_kv_indices(
        req_pool_indices[:batch_size],
        req_to_token,
        lengths[:batch_size],
        topk=topk,
        num_steps=num_steps,
        capacity=indices.shape[1],
        keep_unused=True,
        out=DraftIndicesOutput(
            indptr[:num_steps, : batch_size * topk + 1], indices[:num_steps], _scratch(indices, 1)
        ),
        **options,
    )  # fmt: skip


def _list_accepted(slots, accepted, paths, num_free, num_nodes, *, source=None, target=None, free=None) -> None:
    """accepted_cache_locs into those lists that the caller wants."""
    wanted = source if target is None else target
    batch_size = 1 if accepted is None else accepted.shape[0]
    if num_nodes == 0:
        return
    accepted_cache_locs(
        slots,
        accepted,
        paths,
        free_token_num=num_free,
        num_verify_tokens=num_nodes,
        capacity=wanted.numel(),
        free_capacity=0 if free is None else free.numel(),
        keep_unused=True,
        out=AcceptedOutput(
            path_indptr=_scratch(slots, batch_size + 1),
            source_locs=torch.empty_like(wanted) if source is None else source,
            target_locs=torch.empty_like(wanted) if target is None else target,
            free_indptr=_scratch(slots, batch_size + 1),
            free_locs=_scratch(slots, 0) if free is None else free,
            overflow=_scratch(slots, 2),
        ),
    )


def _scratch(like: torch.Tensor, size: int) -> torch.Tensor:
    """Room for an output of our ops that SGLang's do not have."""
    return torch.empty(size, dtype=torch.int32, device=like.device)


def _refuse_translation(op: str, entry_page_size: int, is_translated: bool) -> None:
    where = f"eagle_kernels.integrations.sglang_cache_locs.{op}"
    if entry_page_size != 1:
        raise ValueError(
            f"{where}: ENTRY_PAGE_SIZE must be 1, tables of pages are not supported, got {entry_page_size}"
        )
    if is_translated:
        raise ValueError(f"{where}: a table that translates slots must not be given, as that is not supported")
