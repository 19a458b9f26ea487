"""KV slots in SGLang: those that a tree's nodes are written to, and the moves of an accepted path."""

import torch

from ...ops import accepted_cache_locs
from ...ops.kv.accepted_cache_locs import Output
from ..sgl_kernel import assign_extend_cache_locs_uniform_func as _assign


def move_accept_tokens_to_target_kvcache(original, batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator):
    """Moves each accepted path to the first slots of its tree, in all layers; SGLang's pool does the copying.
    accept_index [B, S + 1] int, -1 padded; num_correct_drafts [B] int, without the bonus."""
    slots, batch_size = batch.out_cache_loc, len(batch.seq_lens)
    make = lambda size, dtype: torch.empty(size, dtype=dtype, device=slots.device)  # noqa: E731
    # slot 0 is SGLang's for padding: what no path uses is copied from there to there
    size = accept_index.numel()
    source, target = torch.zeros(2, size + size % 2, dtype=torch.int64, device=slots.device)[:, :size].unbind()
    bounds = [make(batch_size + 1, torch.int32) for _ in range(2)]
    accepted_cache_locs(
        slots,
        num_correct_drafts,
        accept_index,
        num_verify_tokens=len(slots) // batch_size,
        keep_unused=True,
        out=Output(bounds[0], source, target, bounds[1], make(0, torch.int64), make(2, torch.int32)),
    )
    token_to_kv_pool_allocator.get_kvcache().move_kv_cache(target, source)


def assign_extend_cache_locs_uniform_func(
    original, req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options
):
    """Returns the slots of every tree's nodes, int64 [B * N]; leaves pools of virtual slots to SGLang."""
    if any(options.get(name) is not None for name in ("full_v2p", "swa_v2p")):
        return original(
            req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options
        )  # fmt: skip
    return _assign(req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options)
