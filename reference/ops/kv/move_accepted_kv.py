"""Reference of move_accepted_kv: one row after another."""

import torch

from ...paged_attention import find_slots


def move_accepted_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    *, num_verify_tokens: int,
) -> None:  # fmt: skip
    """See eagle_kernels/ops/kv/move_accepted_kv.py."""
    num_pages, page_size = k_cache.shape[1:3]
    paths, counts = accept_index.tolist(), accept_token_num.tolist()
    for request, seq_len in enumerate(seq_lens.to(torch.int64).clamp(max=2**62).tolist()):  # no slots are so far
        for depth, index in enumerate(paths[request][: max(counts[request] + 1, 0)]):
            node = index - request * num_verify_tokens
            if not 0 <= node < num_verify_tokens:
                continue
            slots = torch.tensor([seq_len + node, seq_len + depth], dtype=torch.int64, device=k_cache.device)
            page, place, exists = find_slots(block_table[request], slots, num_pages, page_size)
            if exists.all():
                for cache in (k_cache, v_cache):
                    cache[:, page[1], place[1]] = cache[:, page[0], place[0]].clone()
