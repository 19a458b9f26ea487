"""Reference of kv_indices: one request after another."""

from typing import NamedTuple

import torch

from ...slots import Rows, lengths, packed


class Output(NamedTuple):
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    overflow: torch.Tensor


def kv_indices(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor,
    starts: torch.Tensor | None = None,
    *, capacity: int, page_size: int = 1, keep_unused: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/kv/kv_indices.py; `out` gives the dtype and what keep_unused keeps."""
    dtype = torch.int32 if out is None else out.kv_indices.dtype
    rows, device = Rows(req_pool_indices, req_to_token), seq_lens.device
    first_tokens = [0] * len(rows) if starts is None else lengths(starts)
    pages, last_page_len = [], []
    for first, length in zip(first_tokens, lengths(seq_lens)):
        stop = first + length
        pages.append(range(first // page_size, -(-stop // page_size) if length else 0))
        last_page_len.append(stop - pages[-1][-1] * page_size if length else 0)

    def read(request: int, count: int) -> list[int]:
        slots = rows.slots(request, [page * page_size for page in pages[request][:count]])
        return [slot // page_size for slot in slots]  # rounded down: -1 stays -1

    unused = out.kv_indices if keep_unused else -1
    kv_indptr, entries, overflow = packed(list(map(len, pages)), capacity, read, unused=unused, dtype=dtype)
    last_page_len = torch.tensor(last_page_len, dtype=torch.int32, device="cpu")
    return Output(*(part.to(device) for part in (kv_indptr, entries, last_page_len, overflow)))
