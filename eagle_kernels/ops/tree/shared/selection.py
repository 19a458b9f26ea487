"""The largest logits of long rows, exactly and in order, from one read of the rows.

In memory, a row is cut into chunks of LANES groups of LANES ids. `scan_rows` reads all logits and keeps the maxima.
`largest_in_rows` then reads little: the best COUNT ids lie in the COUNT chunks with the largest maxima, and there in
the COUNT groups with the largest maxima (an id elsewhere would have COUNT better ones above it).

Tensors of the selection are [slot, row, LANES]. Launched with a warp for each row, Triton gives every warp
a row and every lane its slots, so a maximum over slots and lanes needs no shared memory and no warp waits for another.
(With another number of warps, or wider warps, it may; the results are the same.)
"""

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import comparable, ordered_bits, short_key, short_key_id, short_key_value
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
# Into how many shares 1 is cut where integers stand for exponentials.
_SHARES = tl.constexpr(2.0**40)


class Scan(NamedTuple):
    """The results of `scan_rows`."""

    group_max: Any  # [rows, num_chunks * LANES] of the logits' type: the maximum of each group
    chunk_max: Any  # [rows, num_chunks] fp32: the maximum of each chunk
    chunk_sum: Any  # [rows, num_chunks] fp32: its sum of exponentials relative to that maximum


class Tiles(NamedTuple):
    """The results of `store_best`."""

    tile_max: Any  # [rows, num_tiles] fp32: the maximum of each tile
    tile_sum: Any  # [rows, num_tiles] fp32: its sum of exponentials relative to that maximum
    keys: Any  # [rows, num_tiles, COUNT] int32: the short keys of its best ids, which count from the tile's first one


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
    chunk, is_chunk, chunk_max, row_max, log_sum = _merge_parts(
        scan.chunk_max, scan.chunk_sum, num_chunks, row, is_row, BLOCK_SLOT
    )
    MAX_ID: tl.constexpr = LANES * LANES * BLOCK_SLOT
    TYPE: tl.constexpr = logits_ptr.dtype.element_ty
    chunk = _largest_ids(chunk_max, chunk, is_chunk, TYPE, MAX_ID, COUNT)
    group = chunk * LANES + lane
    is_group = is_row & (chunk >= 0) & (group * LANES < vocab_size)
    group_max = _load_lanes(scan.group_max, row * (num_chunks * LANES) + group, is_group).to(tl.float32)
    group = _largest_ids(group_max, group, is_group, TYPE, MAX_ID, COUNT)
    token = group * LANES + lane
    is_token = is_row & (group >= 0) & (token < vocab_size)
    logit = _load_lanes(logits_ptr, row * stride_logits_row + token, is_token).to(tl.float32)
    bits, token = _largest_pairs(_pair_bits(logit, is_token), token, COUNT)
    return bits, token, row_max, log_sum


@triton.jit
def store_best(logits, is_token, tile, num_tiles, row, is_row, tiles, COUNT: tl.constexpr):
    """Stores the COUNT best ids of a tile of 16-bit logits [TOKEN, ROW], and its sum, for each of its rows int64 [ROW].
    Exponentials are cut to integers, whose sum depends on no order: so a row's bits do not depend on how Triton lays
    out this number of rows."""
    TYPE: tl.constexpr = logits.dtype
    NUM_TOKENS: tl.constexpr = logits.shape[0]
    logits = logits.to(tl.float32)
    keys = tl.where(is_token[:, None], short_key(logits, tl.arange(0, NUM_TOKENS)[:, None], TYPE), _NO_BITS)
    tile_max = tl.minimum(short_key_value(tl.max(keys, axis=0), TYPE), _LARGEST_FINITE)
    shift = tl.where(tile_max == float("-inf"), 0.0, tile_max)[None, :]
    difference = tl.minimum(comparable(logits), _LARGEST_FINITE) - shift
    shares = tl.where(is_token[:, None], tl.exp2(difference * _LOG2_E) * _SHARES, 0.0).to(tl.int64)
    place = row * num_tiles + tile
    tl.store(tiles.tile_max + place, tile_max, mask=is_row)
    tl.store(tiles.tile_sum + place, tl.sum(shares, axis=0).to(tl.float32) / _SHARES, mask=is_row)
    for count in tl.static_range(COUNT):
        largest = tl.max(keys, axis=0)
        tl.store(tiles.keys + place * COUNT + count, largest, mask=is_row)
        keys = tl.where(keys == largest[None, :], _NO_BITS, keys)


@triton.jit
def largest_in_tiles(
    tiles, num_tiles, row, is_row, COUNT: tl.constexpr, BLOCK_SLOT: tl.constexpr, NUM_TOKENS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Returns what `largest_in_rows` does, from tiles of NUM_TOKENS logits of TYPE; LANES * BLOCK_SLOT is at least
    num_tiles."""
    lane = tl.arange(0, LANES)[None, None, :]
    tile, is_tile, tile_max, row_max, log_sum = _merge_parts(
        tiles.tile_max, tiles.tile_sum, num_tiles, row, is_row, BLOCK_SLOT
    )
    tile = _largest_ids(tile_max, tile, is_tile, TYPE, LANES * BLOCK_SLOT, COUNT)
    is_key = is_row & (tile >= 0) & (lane < COUNT)
    keys = _load_lanes(tiles.keys, (row * num_tiles + tile) * COUNT + lane, is_key)
    bits = _pair_bits(short_key_value(keys, TYPE), is_key & (keys != _NO_BITS))
    bits, token = _largest_pairs(bits, tile * NUM_TOKENS + short_key_id(keys), COUNT)
    return bits, token, row_max, log_sum


@triton.jit
def _merge_parts(max_ptr, sum_ptr, num_parts, row, is_row, BLOCK_SLOT: tl.constexpr):
    """Loads the maxima and sums of the parts of each row. Returns the parts' numbers, whether they exist, and their
    maxima, [slot, BLOCK, LANES]; then the row's maximum (0 where it is -inf) and the logarithm of its sum."""
    part = tl.arange(0, BLOCK_SLOT)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    is_part = is_row & (part < num_parts)
    part_max = _load_lanes(max_ptr, row * num_parts + part, is_part)
    part_max = tl.where(is_part, part_max, float("-inf"))
    part_sum = _load_lanes(sum_ptr, row * num_parts + part, is_part)
    row_max = tl.max(tl.max(part_max, axis=0), axis=1)[None, :, None]
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.sum(part_sum * tl.exp(part_max - row_max), axis=0), axis=1)[None, :, None]
    return part, is_part, part_max, row_max, tl.log(tl.where(row_sum > 0.0, row_sum, 1.0))


@triton.jit
def _load_lanes(pointer, offsets, mask):
    """Loads [slot, row, LANES], neighbours in neighbouring lanes, without a change of layout.
    Triton rearranges three axes for a load, but keeps two axes as the selection needs them if it knows their order."""
    SLOTS: tl.constexpr = offsets.shape[0]
    ROWS: tl.constexpr = offsets.shape[1]
    offsets = tl.max_contiguous(tl.reshape(offsets, [SLOTS * ROWS, LANES]), [1, LANES])
    values = tl.load(pointer + offsets, mask=tl.reshape(mask, [SLOTS * ROWS, LANES]), other=0)
    return tl.reshape(values, [SLOTS, ROWS, LANES])


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
