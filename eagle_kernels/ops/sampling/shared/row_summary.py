"""What is kept of a long row of logits, so that filters need not read all of it again. A row is cut into groups of
LANES tokens and chunks of LANES groups. Of every group the maximum is kept; of every chunk the maximum and, where it is
wanted, the sum of exponentials relative to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.ordering import ordered_bits
from ....runtime.language import next_power_of_2, tl, triton
from .logits import load_processed, load_raw, scaled

NUM_LANES = 32
LANES = tl.constexpr(NUM_LANES)
CHUNK_SIZE = NUM_LANES * NUM_LANES
CHUNK = tl.constexpr(CHUNK_SIZE)

# The ordered bits of -inf, which cannot be drawn.
NEVER = tl.constexpr(-0x7F800001)


class Summary(NamedTuple):
    """Pointers to what `scan_filtered` keeps of one row, and to the room for what is gathered of it."""

    group_rank: Any  # maxima of groups as ordered bits, int32 [num_chunks * LANES]
    chunk_max: Any  # fp32 [num_chunks]
    chunk_sum: Any
    raw_max: Any  # the same of the logits as the model gave them, if log-probabilities are wanted
    raw_sum: Any
    gathered_values: Any  # fp32 [MAX_TOKENS]
    gathered_ids: Any  # int32 [MAX_TOKENS]


@triton.jit
def scan_filtered(row, summary, part, needs_sums, HAS_LOGPROBS: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """Writes the maxima of the groups and chunks of slice `part` of a row and, if needed, the sums of the chunks.
    The kernel has BLOCK_CHUNK warps."""
    chunk = part * BLOCK_CHUNK + tl.arange(0, BLOCK_CHUNK)
    # [BLOCK_CHUNK, CHUNK / WIDTH, WIDTH]: every warp reads chunks of its own, so no maximum and no sum crosses warps
    VECTOR: tl.constexpr = 128 // row.logits.dtype.element_ty.primitive_bitwidth  # what one load of 16 bytes reads
    WIDTH: tl.constexpr = LANES * VECTOR
    offset = tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = chunk[:, None, None] * CHUNK + offset[None, :, :]
    is_token = token < row.VOCAB_SIZE
    logit = load_processed(row, token, is_token)
    # scaling keeps the order, so of a group only the maximum is scaled
    group_max = tl.max(tl.reshape(logit, [BLOCK_CHUNK, CHUNK // WIDTH, VECTOR, LANES]), axis=3)
    group_max = scaled(row, group_max)
    chunk_max = tl.max(tl.max(group_max, axis=1), axis=1)

    # all from [BLOCK_CHUNK, LANES], where every warp still holds its chunks
    NUM_CHUNKS: tl.constexpr = (row.VOCAB_SIZE + CHUNK - 1) // CHUNK
    lane = tl.arange(0, LANES)[None, :]
    chunk = chunk[:, None]
    is_first = (chunk < NUM_CHUNKS) & (lane == 0)
    group_rank = ordered_bits(tl.reshape(group_max, [BLOCK_CHUNK, LANES]))
    tl.store(summary.group_rank + chunk * LANES + lane, group_rank, mask=chunk < NUM_CHUNKS)
    tl.store(summary.chunk_max + chunk + lane, chunk_max[:, None], mask=is_first)
    if needs_sums:
        chunk_sum = _chunk_sum(scaled(row, logit), chunk_max)
        tl.store(summary.chunk_sum + chunk + lane, chunk_sum[:, None], mask=is_first)
    if HAS_LOGPROBS:
        raw = load_raw(row, token, is_token)
        raw_max = tl.max(tl.max(raw, axis=1), axis=1)
        tl.store(summary.raw_max + chunk + lane, raw_max[:, None], mask=is_first)
        tl.store(summary.raw_sum + chunk + lane, _chunk_sum(raw, raw_max)[:, None], mask=is_first)


@triton.jit
def _chunk_sum(value, chunk_max):
    """Returns the sums [chunk] of exponentials of values [chunk, _, _] relative to the chunks' maxima."""
    shift = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
    return tl.sum(tl.sum(tl.exp(value - shift[:, None, None]), axis=1), axis=1)


@triton.jit
def row_mass(chunk_max_ptr, chunk_sum_ptr, shift, VOCAB_SIZE: tl.constexpr):
    """Returns a row's sum of exponentials relative to `shift`."""
    NUM_CHUNKS: tl.constexpr = (VOCAB_SIZE + CHUNK - 1) // CHUNK
    BLOCK_CHUNK: tl.constexpr = next_power_of_2(NUM_CHUNKS)
    # triton 3.6 does not compile axes shorter than a warp
    chunk = tl.arange(0, BLOCK_CHUNK if BLOCK_CHUNK > LANES else LANES)
    chunk_max = tl.load(chunk_max_ptr + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    chunk_sum = tl.load(chunk_sum_ptr + chunk, mask=chunk < NUM_CHUNKS, other=0.0)
    return tl.sum(chunk_sum * tl.exp(chunk_max - shift))
