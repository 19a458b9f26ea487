"""SGLang's Triton kernels that list KV slots for attention, on top of our ops; see sglang_cache_locs.py."""

from torch import Tensor

from ..ops import chain_kv_indices, draft_kv_indices, kv_indices
from ..ops.kv.chain_kv_indices import Output as ChainOutput
from ..ops.kv.draft_kv_indices import Output as DraftIndicesOutput
from ..ops.kv.kv_indices import Output as IndicesOutput
from .sglang_cache_locs import Kernel, refuse_translation, scratch

__all__ = [
    "create_draft_kv_indices", "create_flashinfer_kv_indices_triton", "generate_draft_decode_kv_indices",
    "generate_draft_decode_window_kv_indices",
]  # fmt: skip


@Kernel
def generate_draft_decode_kv_indices(
    grid: tuple[int, ...], req_pool_indices: Tensor, req_to_token: Tensor, paged_kernel_lens: Tensor,
    kv_indices: Tensor, kv_indptr: Tensor, positions: Tensor, row_stride: int, kv_indices_stride: int,
    kv_indptr_stride: int, bs_upper: int, iter_upper: int, num_tokens_upper: int, page_size: int, window_size: int = 0,
    sink_size: int = 0, NUM_STEPS: int = 0, ENTRY_PAGE_SIZE: int = 1, v2p: Tensor | None = None,
    TRANSLATE: bool = False,
) -> None:  # fmt: skip
    """Writes kv_indices [N, *] and kv_indptr [N, *] of N draft steps; grid (N, B, K), or (N * blocks, B, K).
    N is NUM_STEPS if that is given. `draft_kv_indices` documents what is written. As in SGLang, sink_size is ignored
    without a window."""
    refuse_translation(f"{__name__}.generate_draft_decode_kv_indices", ENTRY_PAGE_SIZE, TRANSLATE)
    _list_draft_steps(
        (NUM_STEPS or grid[0], *grid[1:]), req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr,
        page_size=page_size, window_size=window_size, sink_size=sink_size if window_size > 0 else 0,
    )  # fmt: skip


@Kernel
def generate_draft_decode_window_kv_indices(
    grid: tuple[int, ...], req_pool_indices: Tensor, req_to_token: Tensor, paged_kernel_lens: Tensor,
    window_kv_indices: Tensor, window_kv_indptr: Tensor, positions: Tensor, row_stride: int, kv_indices_stride: int,
    kv_indptr_stride: int, bs_upper: int, iter_upper: int, num_tokens_upper: int, page_size: int, window: int,
    ENTRY_PAGE_SIZE: int = 1, v2p: Tensor | None = None, TRANSLATE: bool = False,
) -> None:  # fmt: skip
    """Writes the same lists, cut at every step to the last `window` tokens of prefix and drafts; grid (N, B, K)."""
    refuse_translation(f"{__name__}.generate_draft_decode_window_kv_indices", ENTRY_PAGE_SIZE, TRANSLATE)
    _list_draft_steps(
        grid, req_pool_indices, req_to_token, paged_kernel_lens, window_kv_indices, window_kv_indptr,
        page_size=page_size, window_size=window, window_counts_drafts=True,
    )  # fmt: skip


@Kernel
def create_flashinfer_kv_indices_triton(
    grid: tuple[int, ...], req_to_token_ptr: Tensor, req_pool_indices_ptr: Tensor, page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor, kv_start_idx: Tensor | None, kv_indices_ptr: Tensor, req_to_token_ptr_stride: int,
    ENTRY_PAGE_SIZE: int = 1, TOKEN_BLOCK_PARALLEL: bool = False, token_mapping: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the slots of every request, one after another, to kv_indices; grid (B,) or (B, blocks).
    kv_indptr [B + 1] is the running sum of the lengths, as all callers pass it; it is written again."""
    where, batch_size = f"{__name__}.create_flashinfer_kv_indices_triton", grid[0]
    refuse_translation(where, ENTRY_PAGE_SIZE, token_mapping is not None)
    out = IndicesOutput(
        kv_indptr[: batch_size + 1], kv_indices_ptr.view(-1), scratch(kv_indptr, batch_size), scratch(kv_indptr, 1)
    )
    kv_indices(
        req_pool_indices_ptr[:batch_size], req_to_token_ptr, page_kernel_lens_ptr[:batch_size],
        None if kv_start_idx is None else kv_start_idx[:batch_size],
        capacity=kv_indices_ptr.numel(), keep_unused=True, out=out,
    )  # fmt: skip


@Kernel
def create_draft_kv_indices(
    grid: tuple[int, ...], kv_indptr: Tensor, kv_indices: Tensor, req_pool: Tensor, req_to_token: Tensor,
    seq_lens: Tensor, expand_factor: int, row_stride: int, num_tokens_upper: int,
) -> None:  # fmt: skip
    """Writes one list for each of the last expand_factor tokens of a request, for SGLang's naive EAGLE; grid (B,).
    expand_factor is 2 there and may be any number here. `chain_kv_indices` documents what is written."""
    batch_size = grid[0]
    chain_kv_indices(
        req_pool[:batch_size], req_to_token, seq_lens[:batch_size],
        num_verify_tokens=expand_factor, capacity=kv_indices.numel(), keep_unused=True,
        out=ChainOutput(kv_indptr[: batch_size * expand_factor + 1], kv_indices.view(-1), scratch(kv_indptr, 1)),
    )  # fmt: skip


def _list_draft_steps(grid, req_pool_indices, req_to_token, lengths, indices, indptr, **options) -> None:
    """Calls draft_kv_indices for the first rows and columns of the caller's matrices."""
    num_steps, batch_size, topk = grid
    draft_kv_indices(
        req_pool_indices[:batch_size], req_to_token, lengths[:batch_size],
        topk=topk, num_steps=num_steps, capacity=indices.shape[1], keep_unused=True, **options,
        out=DraftIndicesOutput(indptr[:num_steps, : batch_size * topk + 1], indices[:num_steps], scratch(indices, 1)),
    )  # fmt: skip
