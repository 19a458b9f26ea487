"""Reference of accepted_cache_locs: one request after another."""

from typing import NamedTuple

import torch

from ...slots import lengths, packed


class Output(NamedTuple):
    path_indptr: torch.Tensor
    source_locs: torch.Tensor
    target_locs: torch.Tensor
    free_indptr: torch.Tensor
    free_locs: torch.Tensor
    overflow: torch.Tensor


def accepted_cache_locs(
    cache_locs: torch.Tensor, accept_token_num: torch.Tensor | None = None, accept_index: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None, free_token_num: torch.Tensor | None = None,
    *, num_verify_tokens: int, page_size: int = 1, capacity: int | None = None, free_capacity: int | None = None,
    keep_unused: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/accepted_cache_locs.py; `out` is read for keep_unused, not written."""
    batch_size, device = len(cache_locs) // num_verify_tokens, cache_locs.device
    windows = cache_locs.view(batch_size, num_verify_tokens).tolist()
    sources, targets, freed = [], [], []
    for request, window in enumerate(windows):
        window = [max(slot, -1) for slot in window]
        path = _path(accept_index, request, num_verify_tokens)
        accepted = len(path) - 1 if accept_token_num is None else int(accept_token_num[request])
        path = [node if 0 <= node < num_verify_tokens else None for node in path]
        nodes = [node for node in path[: max(accepted + 1, 0)] if node is not None]
        front = window + [-1] * len(nodes)
        pairs = [(window[node], front[place]) for place, node in enumerate(nodes)]
        pairs = [pair if -1 not in pair else (-1, -1) for pair in pairs]
        sources.append([source for source, _ in pairs])
        targets.append([target for _, target in pairs])

        is_dead = accepted < 0 or not path or path[0] is None
        first_free = num_verify_tokens
        if free_token_num is not None:
            first_free -= min(lengths(free_token_num)[request], num_verify_tokens)
        elif seq_lens is not None:
            seq_len = lengths(seq_lens)[request]
            first_free = -(-(seq_len + accepted + 1) // page_size) * page_size - seq_len
        freed.append([] if is_dead else window[max(first_free, 0) :])

    if capacity is None:
        capacity = batch_size * (num_verify_tokens if accept_index is None else accept_index.shape[1])
    if free_capacity is None:
        is_freed = seq_lens is not None or free_token_num is not None
        free_capacity = batch_size * num_verify_tokens if is_freed else 0

    def listed(lists: list[list[int]], room: int, field: str):
        unused = getattr(out, field) if keep_unused else -1
        return packed(list(map(len, lists)), room, lambda index, count: lists[index][:count], unused=unused)

    path_indptr, source_locs, path_overflow = listed(sources, capacity, "source_locs")
    _, target_locs, _ = listed(targets, capacity, "target_locs")
    free_indptr, free_locs, free_overflow = listed(freed, free_capacity, "free_locs")
    overflow = torch.cat([path_overflow, free_overflow])
    lists = (path_indptr, source_locs, target_locs, free_indptr, free_locs, overflow)
    return Output(*(part.to(device) for part in lists))


def _path(accept_index: torch.Tensor | None, request: int, num_nodes: int) -> list[int]:
    """The nodes that a request's row of accept_index names; of a chain, all in order."""
    if accept_index is None:
        return list(range(num_nodes))
    return [index - request * num_nodes for index in accept_index[request].tolist()]
