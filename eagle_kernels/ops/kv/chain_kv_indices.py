"""KV indices that make one request of every token of a chain: each token's list ends with the token itself.

Computes: A chain of N tokens is verified by attention that takes one query per request. With N = 2 these are the
    indices of naive EAGLE, where the root and its one draft are decoded as two requests.
Invariants: No index is written past `capacity`, and no bound exceeds it; nothing outside the table is read.
Grid: (max(B * N, 1), chunks) for B requests, one program writes every chunks-th block of one row's indices and its
    share of the unused tail; chunk 0 writes the bound as well.
Launches: 1
Traffic: element size * (number of indices) read, 4 B * (capacity + B * N + 2) written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import check_capacity, check_keep_unused, fill_unused, read_lengths, store_overflow
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.rows import ROW_SIZES, check_listed, check_rows, debug_rows, find_row, read_slots, row_arguments


class Output(NamedTuple):
    """What `chain_kv_indices` returns."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    overflow: torch.Tensor


# Up to max_chunks programs write a request's list, block by block, after each has summed up the requests before it.
TUNING = {"default": {"BLOCK_BATCH": 128, "BLOCK_INDEX": 512, "max_chunks": 32, "num_warps": 4}}


@triton.jit
def _count(kv_len, num_tokens, chain_length):
    """Counts the indices of the first num_tokens tokens of a chain: the sum of their lists' lengths."""
    num_empty = tl.maximum(chain_length - 1 - kv_len, 0)  # the request has fewer tokens
    num_lists = tl.maximum(num_tokens - num_empty, 0)
    shortest = kv_len - chain_length + 1 + num_empty
    return num_lists * shortest + num_lists * (num_lists - 1) // 2


@triton.jit(do_not_specialize=[*ROW_SIZES, "batch_size", "num_verify_tokens", "capacity"])
def _chain_kv_indices_kernel(
    rows, kv_lens_ptr, out,
    num_rows, row_size, stride_req_to_token_row, batch_size, num_verify_tokens, capacity,
    KEEPS_UNUSED: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_INDEX: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    query = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    chain_length = num_verify_tokens.to(tl.int64)
    request = query // chain_length
    token = query % chain_length
    is_live = request < batch_size  # an empty batch has one program, for its bound and tail

    row = find_row(rows, request, is_live, num_rows, row_size, stride_req_to_token_row)
    kv_len = read_lengths(kv_lens_ptr, request, is_live)
    sum_before = tl.zeros([BLOCK_BATCH], tl.int64)
    sum_total = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        counts = _count(read_lengths(kv_lens_ptr, other, other < batch_size), chain_length, chain_length)
        sum_before += tl.where(other < request, counts, 0)
        sum_total += counts
    begin = tl.sum(sum_before) + _count(kv_len, token, chain_length)
    total = tl.sum(sum_total)
    count = tl.maximum(kv_len - chain_length + 1 + token, 0)

    index = tl.arange(0, BLOCK_INDEX)
    for start in range(chunk * BLOCK_INDEX, tl.minimum(count, capacity), num_chunks * BLOCK_INDEX):
        column = start + index
        slot = read_slots(row, column, column < count)
        place = begin + column
        tl.store(out.kv_indices + place, slot, mask=(column < count) & (place < capacity))
    if not KEEPS_UNUSED:
        part = query * num_chunks + chunk
        fill_unused(out.kv_indices, total, capacity, part, tl.num_programs(0) * num_chunks, -1, BLOCK_INDEX)

    if chunk == 0:
        tl.store(out.kv_indptr + query + 1, tl.minimum(begin + count, capacity).to(tl.int32), mask=is_live)
        if query == 0:
            tl.store(out.kv_indptr, 0)
            store_overflow(out.overflow, total, capacity)


def contract(values: dict) -> Output:
    args = check.Arguments("chain_kv_indices", values)
    num_verify_tokens = args.integer("num_verify_tokens", 1, check.MAX_INT32)
    capacity = check_capacity(args)
    check_keep_unused(args)
    check_rows(args)
    args.tensor("kv_lens", ("B",), check.INTEGER)
    num_rows = args.size("B") * num_verify_tokens
    if num_rows > check.MAX_INT32:
        args.fail("num_verify_tokens", f"give at most {check.MAX_INT32} rows in all", num_rows)
    kv_lens = values["kv_lens"]
    stop, is_read = lambda: kv_lens, lambda column: column < kv_lens[:, None]
    debug_rows(args, ("kv_lens",), stop, is_read)
    return Output(
        args.spec((num_rows + 1,), torch.int32),
        check_listed(args, args.integers((capacity,), 1), stop, is_read),
        args.spec((1,), torch.int32),
    )


@launcher
def chain_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    num_verify_tokens: int,
    capacity: int,
    keep_unused: bool = False,
    out: Output | None = None,
) -> Output:
    """Lists the KV slots that each token of a chain attends to, as if every token were a request.

    Token n of request b's chain becomes row b * N + n. It attends to the first kv_lens[b] - N + 1 + n tokens of the
    request, of which it is the last.

    Args:
        req_pool_indices: [B] int. Each request's row of `req_to_token`.
        req_to_token: [R, C] int. Pool slot of token t of a row in column t. Rows may be strided.
        kv_lens: [B] int. Tokens of each request, the chain's N included; negative ones count as 0.
        num_verify_tokens: N, tokens of a chain, its root included, at least 1.
        capacity: room for all indices. N * (sum of kv_lens) is always enough.
        keep_unused: the unused tail of `out.kv_indices` stays as it is.
        out: three tensors to write into.

    Returns:
        A named tuple:
        kv_indptr: [B * N + 1] int32. Where the entries of each row in `kv_indices` begin and end. A request of fewer
            than N tokens has none for the first tokens of its chain.
        kv_indices: [capacity] int32, or int64 if `out` holds int64. Pool slots, -1 padded; -1 also where the table has
            none.
        overflow: [1] int32. The room needed if it exceeds `capacity`, where lists and bounds end; else 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative kv_lens and entries, and places outside the table.

    Source:
        Naive EAGLE, a pull request for SGLang: its create_draft_kv_indices, for N = 2. Other N are eagle_kernels' own.

    Example:
        >>> listed = eagle_kernels.chain_kv_indices(
        ...     torch.tensor([0]), torch.tensor([[10, 11, 12, 13]]), torch.tensor([3]), num_verify_tokens=2, capacity=6)
        >>> listed.kv_indices.tolist()  # the root attends to two tokens, its draft to three
        [10, 11, 10, 11, 12, -1]
    """
    out = check.allocate("chain_kv_indices", contract(locals()), out)
    batch_size, row_size = kv_lens.shape[0], req_to_token.shape[1]
    tuned = dict(tuning.row(TUNING, kv_lens.device))
    num_chunks = max(1, min(tuned.pop("max_chunks"), -(-row_size // tuned["BLOCK_INDEX"])))
    launch(
        "chain_kv_indices", _chain_kv_indices_kernel, (max(batch_size * num_verify_tokens, 1), num_chunks),
        kv_lens_ptr=kv_lens, out=out, **row_arguments(req_pool_indices, req_to_token), batch_size=batch_size,
        num_verify_tokens=num_verify_tokens, capacity=capacity,
        KEEPS_UNUSED=keep_unused, **tuned,
    )  # fmt: skip
    return out
