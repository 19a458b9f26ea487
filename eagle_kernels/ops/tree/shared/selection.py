"""The largest logits of long rows, exactly and in order, from one read of the rows.

A row is cut into chunks of LANES groups of LANES ids. `scan_rows` reads all logits and keeps the maxima.
`largest_in_rows` then reads little: the best COUNT ids lie in the COUNT chunks with the largest maxima, and there in
the COUNT groups with the largest maxima (an id elsewhere would have COUNT better ones above it).

Tensors of the selection are [slot, row, LANES]. Launched with a warp for each row, Triton gives every warp
a row and every lane its slots, so a maximum over slots and lanes needs no shared memory and no warp waits for another.
(With another number of warps, or wider warps, it may; the results are the same.)
"""

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import comparable, ordered_bits, short_key, short_key_id
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

# Not tuned: the bits of a sum depend on where it is cut.
NUM_LANES = 32
CHUNK_SIZE = NUM_LANES * NUM_LANES
LANES = tl.constexpr(NUM_LANES)
CHUNK = tl.constexpr(CHUNK_SIZE)

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/select_top_k_tokens.txt
SCAN_TUNING = {"default": {"BLOCK_CHUNK": 4}}

_LARGEST_FINITE = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Below the ordered bits of all values: marks places without a pair.
_NO_BITS = tl.constexpr(-(2**31))
_NO_ID = tl.constexpr(2**31 - 1)


class Scan(NamedTuple):
    """The results of `scan_rows`."""

    group_max: Any  # [rows, num_chunks * LANES] of the logits' type: the maximum of each group
    chunk_max: Any  # [rows, num_chunks] fp32: the maximum of each chunk
    chunk_sum: Any  # [rows, num_chunks] fp32: its sum of exponentials relative to that maximum


@triton.jit(do_not_specialize=["stride_logits_row", "num_vectors", "num_chunks"])
def _select_top_k_tokens_scan_kernel(
    logits_ptr, scan, stride_logits_row, num_vectors, num_chunks,
    VECTOR: tl.constexpr, BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Scans BLOCK_CHUNK chunks of a row of num_vectors * VECTOR logits."""
    await_predecessor(ENABLE_PDL)
    num_blocks = tl.cdiv(num_chunks, BLOCK_CHUNK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_row * VECTOR
    # found before the row is read: after it they would take registers from the logits
    group_max_ptr = scan.group_max + row * num_chunks * LANES
    chunk_max_ptr, chunk_sum_ptr = scan.chunk_max + row * num_chunks, scan.chunk_sum + row * num_chunks
    chunk = tl.program_id(0) % num_blocks * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    # [BLOCK_CHUNK, CHUNK / WIDTH, WIDTH]: every warp reads chunks of its own, so no maximum and no sum crosses warps
    WIDTH: tl.constexpr = LANES * VECTOR
    offset = tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = chunk[:, None, None] * CHUNK + offset[None, :, :]
    # a length in vectors: the compiler sees that it is a multiple of them, and loads vectors
    logit = tl.load(row_ptr + token, mask=token < num_vectors * VECTOR, other=float("-inf")).to(tl.float32)
    # an infinite maximum would make NaN of the differences below
    logit = tl.where(logit == logit, tl.minimum(logit, _LARGEST_FINITE), float("-inf"))
    group_max = tl.max(tl.reshape(logit, [BLOCK_CHUNK, CHUNK // WIDTH, VECTOR, LANES]), axis=3)
    chunk_max = tl.max(tl.max(group_max, axis=1), axis=1)
    shift = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    chunk_sum = tl.sum(tl.sum(tl.exp2((logit - shift[:, None, None]) * _LOG2_E), axis=1), axis=1)

    # all from [BLOCK_CHUNK, LANES], where every warp still holds its chunks
    lane = tl.arange(0, LANES)[None, :]
    chunk = chunk[:, None]
    is_first = (chunk < num_chunks) & (lane == 0)
    group_max = tl.reshape(group_max, [BLOCK_CHUNK, LANES])
    tl.store(group_max_ptr + chunk * LANES + lane, group_max, mask=chunk < num_chunks)
    tl.store(chunk_max_ptr + chunk + lane, chunk_max[:, None], mask=is_first)
    tl.store(chunk_sum_ptr + chunk + lane, chunk_sum[:, None], mask=is_first)


def scan_rows(op: str, logits: torch.Tensor) -> Scan:
    """Launches the kernel above, which reads all logits, and returns its results."""
    device, (num_rows, vocab_size) = logits.device, logits.shape
    num_chunks, tuned = triton.cdiv(vocab_size, CHUNK_SIZE), tuning.row(SCAN_TUNING, device)
    vector = 16 // logits.element_size()
    if vocab_size % vector or logits.stride(0) % vector:
        vector = 1  # rows start anywhere
    scan = Scan(
        torch.empty((num_rows, num_chunks * NUM_LANES), dtype=logits.dtype, device=device),
        torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device),
    )
    launch(
        op, _select_top_k_tokens_scan_kernel, (num_rows * triton.cdiv(num_chunks, tuned["BLOCK_CHUNK"]),),
        logits_ptr=logits, scan=scan, stride_logits_row=logits.stride(0) // vector, num_vectors=vocab_size // vector,
        num_chunks=num_chunks,
        VECTOR=vector, num_warps=tuned["BLOCK_CHUNK"], **tuned,
    )  # fmt: skip
    return scan


@triton.jit
def largest_in_rows(
    logits_ptr, stride_logits_row, vocab_size, num_chunks, scan, row, is_row,
    COUNT: tl.constexpr, BLOCK_SLOT: tl.constexpr,
):  # fmt: skip
    """Returns the COUNT best ids of some rows, and the log-sum-exp of each row in two parts.
    row int64 [1, BLOCK, 1]; LANES * BLOCK_SLOT is at least num_chunks. The results are (ordered bits, ids) int32
    [COUNT to a power of two, BLOCK, LANES], the same in all lanes, by descending logit and ascending id, and (maximum,
    logarithm of the sum of exponentials relative to it) [1, BLOCK, 1]."""
    lane = tl.arange(0, LANES)[None, None, :]
    chunk = tl.arange(0, BLOCK_SLOT)[:, None, None] * LANES + lane
    is_chunk = is_row & (chunk < num_chunks)
    chunk_max = _load_lanes(scan.chunk_max, row * num_chunks + chunk, is_chunk)
    chunk_max = tl.where(is_chunk, chunk_max, float("-inf"))
    chunk_sum = _load_lanes(scan.chunk_sum, row * num_chunks + chunk, is_chunk)
    row_max = tl.max(tl.max(chunk_max, axis=0), axis=1)[None, :, None]
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.sum(chunk_sum * tl.exp(chunk_max - row_max), axis=0), axis=1)[None, :, None]
    log_sum = tl.log(tl.where(row_sum > 0.0, row_sum, 1.0))

    MAX_ID: tl.constexpr = LANES * LANES * BLOCK_SLOT
    TYPE: tl.constexpr = logits_ptr.dtype.element_ty
    chunk = _largest_ids(chunk_max, chunk, is_chunk, TYPE, MAX_ID, COUNT)
    group = chunk * LANES + lane
    is_group = is_row & (chunk >= 0) & (group * LANES < vocab_size)
    group_max = _load_lanes(scan.group_max, row * (num_chunks * LANES) + group, is_group)
    group = _largest_ids(group_max, group, is_group, TYPE, MAX_ID, COUNT)
    token = group * LANES + lane
    is_token = is_row & (group >= 0) & (token < vocab_size)
    logit = _load_lanes(logits_ptr, row * stride_logits_row + token, is_token)
    bits, token = _largest_pairs(_pair_bits(logit, is_token), token, COUNT)
    return bits, token, row_max, log_sum


@triton.jit
def _load_lanes(pointer, offsets, mask):
    """Loads [slot, row, LANES], neighbours in neighbouring lanes, without a change of layout.
    Triton rearranges three axes for a load, but keeps two axes as the selection needs them if it knows their order."""
    SLOTS: tl.constexpr = offsets.shape[0]
    ROWS: tl.constexpr = offsets.shape[1]
    offsets = tl.max_contiguous(tl.reshape(offsets, [SLOTS * ROWS, LANES]), [1, LANES])
    values = tl.load(pointer + offsets, mask=tl.reshape(mask, [SLOTS * ROWS, LANES]), other=0.0)
    return tl.reshape(values, [SLOTS, ROWS, LANES]).to(tl.float32)


@triton.jit
def _pair_bits(values, exists):
    """Returns int32 that order as the fp32 values do (NaN as -inf, +inf as finite), the lowest where no pair exists."""
    return tl.where(exists, ordered_bits(tl.minimum(comparable(values), _LARGEST_FINITE)), _NO_BITS)


@triton.jit
def _largest_ids(values, ids, exists, TYPE: tl.constexpr, MAX_ID: tl.constexpr, COUNT: tl.constexpr):
    """Returns the ids of `_largest_pairs`, from values that were of TYPE and ids below MAX_ID.
    If both fit 16 bits, one number holds the pair, and a round takes one maximum."""
    if TYPE.primitive_bitwidth == 16 and MAX_ID <= 65536:
        BLOCK_COUNT: tl.constexpr = next_power_of_2(COUNT)
        rank = tl.arange(0, BLOCK_COUNT)[:, None, None]
        keys = tl.where(exists, short_key(values, ids, TYPE), _NO_BITS)
        best = tl.full([BLOCK_COUNT, keys.shape[1], LANES], _NO_BITS, tl.int32)
        for count in range(COUNT):
            largest = tl.max(tl.max(keys, axis=0), axis=1)[None, :, None]
            best = tl.where(rank == count, largest, best)
            keys = tl.where(keys == largest, _NO_BITS, keys)
        best_ids = tl.where(best == _NO_BITS, -1, short_key_id(best))
    else:
        _, best_ids = _largest_pairs(_pair_bits(values, exists), ids, COUNT)
    return best_ids


@triton.jit
def _largest_pairs(bits, ids, COUNT: tl.constexpr):
    """Returns the COUNT largest pairs of each row: larger bits first, equal ones by ascending id.
    bits and distinct ids, int32 [slot, row, LANES] -> bits and ids [COUNT to a power of two, row, LANES], the same in
    all lanes; id -1 where a row has no more pairs, and from COUNT on."""
    BLOCK_COUNT: tl.constexpr = next_power_of_2(COUNT)
    rank = tl.arange(0, BLOCK_COUNT)[:, None, None]
    best_bits = tl.full([BLOCK_COUNT, bits.shape[1], LANES], _NO_BITS, tl.int32)
    best_ids = tl.full([BLOCK_COUNT, bits.shape[1], LANES], -1, tl.int32)
    for count in range(COUNT):
        largest = tl.max(tl.max(bits, axis=0), axis=1)[None, :, None]
        holder = tl.min(tl.min(tl.where(bits == largest, ids, _NO_ID), axis=0), axis=1)[None, :, None]
        best_bits = tl.where(rank == count, largest, best_bits)
        best_ids = tl.where((rank == count) & (largest != _NO_BITS), holder, best_ids)
        bits = tl.where(ids == holder, _NO_BITS, bits)
    return best_bits, best_ids
