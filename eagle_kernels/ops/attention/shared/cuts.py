"""Cuts the keys of a batch into even chunks, whatever the lengths of its requests.

Keys are counted in blocks of BLOCK slots of one request, from the first that a row may see; the draft block comes after
the prefix. A request has at least one block, since a program has to write its outputs. The blocks of all requests, one
request after another, are cut into chunks of equal size.

A program that goes on to another request fills its pipeline again: meanwhile it would have read the keys of a few
blocks. So there is a gap before each short request, whose SWITCH_BLOCKS count like blocks of keys, unless chunks are
that short themselves: then requests begin where chunks do.

Programs find their chunks, or the parts of a request, by the lengths of all requests, which they read themselves:
nothing is planned on the host, and a captured graph serves all lengths. `plan_attention` does the sum once for all
layers. A plan of other lengths costs time and no key, since a request's last block goes on to its last key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.language import tl, triton
from .batch import slot_range

# A part begins and ends at a multiple of BLOCK_KEY, at or before the place where the cut is.
BLOCK_SLOTS = 32
BLOCK = tl.constexpr(BLOCK_SLOTS)
SWITCH_BLOCKS, SHORT_BLOCKS = tl.constexpr(8), tl.constexpr(32)


@triton.jit
def count_blocks(first, stop):
    """Returns how many blocks hold the slots first..stop - 1, of one request or of several."""
    return tl.maximum(tl.cdiv(stop, BLOCK) - first // BLOCK, 1)


@triton.jit
def is_short(num_blocks):
    """Returns whether a request of so few blocks may have a gap before it."""
    return num_blocks < SHORT_BLOCKS


@triton.jit
def _block_stops(batch, start, before, SHAPE: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Returns (stops, num_blocks, shorts) of BLOCK_BATCH requests from `start` on: where their blocks end, without
    gaps, in the order of the whole batch, how many they have, and 1 for each short request.

    before: how many blocks the requests before have; a plan knows that by itself.
    """
    request = (start + tl.arange(0, BLOCK_BATCH)).to(tl.int64)
    is_live = request < batch.batch_size
    if batch.lengths.plan is None:
        first, _, stop = slot_range(batch, request, SHAPE)
        num_blocks = tl.where(is_live, count_blocks(first, stop), 0)
        stops = before + tl.cumsum(num_blocks)
    else:
        stops = tl.load(batch.lengths.plan + request + 1, mask=is_live, other=0)
        num_blocks = stops - tl.load(batch.lengths.plan + request, mask=is_live, other=0)
    return stops, num_blocks, (is_live & is_short(num_blocks)).to(tl.int32)


class Cut(NamedTuple):
    """How all `total` blocks are cut: chunk c begins at c * total // num_chunks, so that even lengths are cut alike."""

    total: Any  # with the gaps
    num_chunks: Any
    gap: Any  # before each short request, in blocks


@triton.jit
def chunk_span(cut, chunk):
    """Returns (begin, stop) of a chunk, in blocks; of one that there is not, (0, 0).

    int32 is enough for the products, as there are a few thousand chunks at most.
    """
    size, rest = cut.total // cut.num_chunks, cut.total % cut.num_chunks
    extra = chunk * rest // cut.num_chunks
    begin = chunk * size + extra
    stop = begin + size + (chunk * rest - extra * cut.num_chunks + rest >= cut.num_chunks).to(tl.int32)
    is_chunk = chunk < cut.num_chunks
    return tl.where(is_chunk, begin, 0), tl.where(is_chunk, stop, 0)


@triton.jit
def cut_slot(first, stop, block, BLOCK_KEY: tl.constexpr):
    """Returns the slot, a multiple of BLOCK_KEY, where a request is cut before one of its blocks.

    A plan of other lengths may name blocks that there are not; the cut is then at the request's end, rounded down.
    """
    ahead = tl.minimum(tl.maximum(block, 0), tl.cdiv(stop, BLOCK) - first // BLOCK)
    return (first // BLOCK + ahead) * BLOCK // BLOCK_KEY * BLOCK_KEY


@triton.jit
def chunk_of(cut, block):
    """Returns the chunk to which a block belongs."""
    return (((block + 1).to(tl.int64) * cut.num_chunks - 1) // cut.total).to(tl.int32)


@triton.jit
def _cut(total, num_short, batch_size, num_chunks, LEAST_BLOCKS: tl.constexpr):
    """Returns the Cut into at most num_chunks chunks, of at least LEAST_BLOCKS blocks if the keys suffice."""
    total = tl.maximum(total, 1)
    num_chunks = tl.minimum(num_chunks, tl.maximum(total // LEAST_BLOCKS, 1))
    gap = tl.where((total >= SWITCH_BLOCKS * num_chunks) & (batch_size > 1), SWITCH_BLOCKS, 0)
    return Cut(total + gap * num_short, num_chunks, gap)


@triton.jit
def find_cut(batch, num_chunks, LEAST_BLOCKS: tl.constexpr, SHAPE: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Returns how the blocks of the batch are cut, see `_cut`."""
    total, num_short = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        stops, _, shorts = _block_stops(batch, start, total, SHAPE, BLOCK_BATCH)
        total = tl.max(stops)
        num_short += tl.sum(shorts)
    return _cut(total, num_short, batch.batch_size, num_chunks, LEAST_BLOCKS)


@triton.jit
def find_block(batch, cut, block, chunk_stop, SHAPE: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Returns (request int64, where it begins, with its gap) of a block; request batch_size if there are fewer.

    Third comes chunk_stop, or, if that is in a gap, where the gap begins.
    """
    request, begin = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    before, num_short = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        stops, num_blocks, shorts = _block_stops(batch, start, before, SHAPE, BLOCK_BATCH)
        before = tl.max(stops)
        stops += cut.gap * (num_short + tl.cumsum(shorts))
        gap_stop = stops - num_blocks
        gap_begin = gap_stop - cut.gap * shorts
        is_in_gap = (gap_begin < chunk_stop) & (chunk_stop <= gap_stop)
        chunk_stop = tl.min(tl.where(is_in_gap, gap_begin, chunk_stop))
        num_short += tl.sum(shorts)
        is_passed = (stops <= block) & (start + tl.arange(0, BLOCK_BATCH) < batch.batch_size)
        request += tl.sum(is_passed.to(tl.int32))
        begin = tl.maximum(begin, tl.max(tl.where(is_passed, stops, 0)))
    return request, begin, chunk_stop


@triton.jit
def find_parts(batch, request, num_chunks, LEAST_BLOCKS: tl.constexpr, SHAPE: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Returns (the chunk in which a request begins, in how many it is), also of a malformed plan chunks that exist."""
    begin, stop, total = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    num_gaps, num_short = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, batch.batch_size, BLOCK_BATCH):
        stops, _, shorts = _block_stops(batch, start, total, SHAPE, BLOCK_BATCH)
        other = start + tl.arange(0, BLOCK_BATCH)
        begin = tl.maximum(begin, tl.max(tl.where(other < request, stops, 0)))
        stop = tl.maximum(stop, tl.max(tl.where(other <= request, stops, 0)))
        num_gaps += tl.sum(tl.where(other <= request, shorts, 0))
        total = tl.max(stops)
        num_short += tl.sum(shorts)
    cut = _cut(total, num_short, batch.batch_size, num_chunks, LEAST_BLOCKS)
    gaps = cut.gap * num_gaps
    first = tl.minimum(tl.maximum(chunk_of(cut, begin + gaps), 0), num_chunks - 1)
    return first, tl.minimum(chunk_of(cut, stop - 1 + gaps) - first + 1, num_chunks - first)
