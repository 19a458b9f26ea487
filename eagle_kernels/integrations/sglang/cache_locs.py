"""KV slots in SGLang: those that a tree's nodes are written to, and the moves of an accepted path."""

import torch

from ...ops import accepted_cache_locs, cache_addresses, move_accepted_kv
from ...ops.kv.accepted_cache_locs import Output
from ..sgl_kernel import assign_extend_cache_locs_uniform_func as _assign


def move_accept_tokens_to_target_kvcache(original, batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator):
    """Moves each accepted path to the first slots of its tree, in all layers; SGLang's pool does the copying, but not
    that of latents, which would take two launches per layer.
    accept_index [B, S + 1] int, -1 padded; num_correct_drafts [B] int, without the bonus."""
    slots, batch_size = batch.out_cache_loc, len(batch.seq_lens)
    pool = token_to_kv_pool_allocator.get_kvcache()
    if type(pool).__name__ == "MLATokenToKVPool":  # those derived from it keep more of a token than latents
        keys, values, addresses = _latents_of(pool)
        move_accepted_kv(
            keys, values, slots.view(batch_size, -1), slots.new_zeros(batch_size), accept_index, num_correct_drafts,
            num_verify_tokens=len(slots) // batch_size, cache_addresses=addresses,
        )  # fmt: skip
        return
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
    pool.move_kv_cache(target, source)


def _latents_of(pool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the halves of the first layer's rows, [1, slots, 1, 1, D] each, and the table of those of all layers.

    The table is kept on the pool, but holds none of its buffers: the pool may free them, and allocate others.
    """
    places = [buffer.data_ptr() for buffer in pool.kv_buffer]
    known, table = getattr(pool, "eagle_kernels_addresses", (None, None))
    if known != places:
        table = cache_addresses(*zip(*map(_halves, pool.kv_buffer)))
        pool.eagle_kernels_addresses = places, table
    keys, values = _halves(pool.kv_buffer[0])
    return keys[None], values[None], table


def _halves(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the halves of rows [slots, 1, 2 D], as caches with a page for each slot."""
    return buffer.unflatten(-1, (2, -1)).split(1, dim=-2)


def assign_extend_cache_locs_uniform_func(
    original, req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options
):
    """Returns the slots of every tree's nodes, int64 [B * N]; leaves pools of virtual slots to SGLang."""
    if any(options.get(name) is not None for name in ("full_v2p", "swa_v2p")):
        return original(
            req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options
        )  # fmt: skip
    return _assign(req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **options)
