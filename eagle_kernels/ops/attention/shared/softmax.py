"""Online softmax over tiles of keys, and the merge of results that were computed over disjoint sets of keys.

Attention over a long KV cache is split over programs. Each keeps, per query row, the largest logit so far, the sum of
exponentials relative to it, and the weighted sum of values (Milakov & Gimelshein, arXiv 1805.02867); the partial
results merge by their log-sum-exp (Flash-Decoding). Inside a program logits are in base 2, as GPUs compute exp2.
"""

from __future__ import annotations

from ....runtime.language import is_interpreting, next_power_of_2, tl, triton
from .columns import convert_columns, first_columns, num_columns, rest_columns, scale_columns

LOG2_E = 1.4426950408889634
# whose tl.dot takes bfloat16 for integers
IS_INTERPRETING = tl.constexpr(is_interpreting())


@triton.jit
def start_rows(BLOCK_ROW: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SUMS: tl.constexpr = 1):
    """Returns the state of rows that have seen no key: largest logit, sum of exponentials, weighted sum of values.

    The last is a tuple of parts (`columns.py`). NUM_SUMS above 1: the second is [ROW, NUM_SUMS], one for each key of a
    tile, and `total_sums` adds them in the end: few rows are spread over all warps, which would otherwise wait for each
    other in every tile.
    """
    row_max = tl.full([BLOCK_ROW], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROW], tl.float32) if NUM_SUMS == 1 else tl.zeros([BLOCK_ROW, NUM_SUMS], tl.float32)
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    REST: tl.constexpr = rest_columns(HEAD_DIM, FIRST)
    first = tl.zeros([BLOCK_ROW, FIRST], tl.float32)
    if REST > 0:
        return row_max, row_sum, (first, tl.zeros([BLOCK_ROW, REST], tl.float32))
    else:
        return row_max, row_sum, (first,)


@triton.jit
def match_keys(query, scale, k_scale_ptr, KEY_TYPE: tl.constexpr):
    """Returns (query in parts, scale [ROW] of its logits) for keys of KEY_TYPE, whose own scale is at k_scale_ptr.

    8-bit keys are widened to fp16, in one step and without loss. So a bf16 query becomes fp16 too, in rows that are
    brought below 2 by powers of two; fp16 loses at most 2^-24 of the row's largest element.
    """
    if k_scale_ptr is not None:
        # keys that are all 0 may have the scale 0
        scale = tl.maximum(scale * tl.load(k_scale_ptr), 1e-30)
    scale += tl.zeros([query[0].shape[0]], tl.float32)
    if (KEY_TYPE.is_fp8() or KEY_TYPE.is_int8()) and query[0].dtype == tl.bfloat16:
        query = convert_columns(query, tl.float32)
        largest = tl.max(tl.abs(query[0]), axis=1)
        for index in tl.static_range(1, len(query)):
            largest = tl.maximum(largest, tl.max(tl.abs(query[index]), axis=1))
        power = largest.to(tl.int32, bitcast=True) & 0x7F800000
        # limited so that the inverse is a normal number too
        power = tl.minimum(tl.maximum(power, 0x00800000), 0x7E000000)
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
        query = convert_columns(scale_columns(query, inverse[:, None]), tl.float16)
        scale *= power.to(tl.float32, bitcast=True)
    return query, scale


@triton.jit
def multiply_keys(query, key, scale, soft_cap):
    """Returns (logits [ROW, KEY], factors [ROW] to base 2) of rows of queries and keys, both in parts.

    scale [ROW] includes log2(e) and the scale of the keys. soft_cap (or None): logits become soft_cap * tanh(logits /
    soft_cap).
    """
    if IS_INTERPRETING and query[0].dtype == tl.bfloat16:
        query, key = convert_columns(query, tl.float32), convert_columns(key, tl.float32)
    logits = tl.dot(query[0], tl.trans(key[0]), input_precision="ieee")
    for index in tl.static_range(1, len(key)):
        logits = tl.dot(query[index], tl.trans(key[index]), logits, input_precision="ieee")
    if soft_cap is not None:
        capped = _soft_capped(logits * scale[:, None], soft_cap * 1.4426950408889634)
        return capped, tl.full(scale.shape, 1.0, tl.float32)
    else:
        return logits, scale


@triton.jit
def multiply_apart(query, key, scale):
    """Returns (logits of the first part, logits of the second, scale), which `multiply_keys` would add."""
    if IS_INTERPRETING and query[0].dtype == tl.bfloat16:
        query, key = convert_columns(query, tl.float32), convert_columns(key, tl.float32)
    first = tl.dot(query[0], tl.trans(key[0]), input_precision="ieee")
    return first, tl.dot(query[1], tl.trans(key[1]), input_precision="ieee"), scale


@triton.jit
def add_tile(logits, scale, value, row_max, row_sum, accumulator):
    """Returns the state of rows after one more tile: logits [ROW, KEY], -inf for unseen keys, and values in parts.

    Values that no row sees must be finite (loaded as 0): their weight is 0, but 0 * NaN is NaN.
    """
    row_max, row_sum, weight, decay = weigh_tile(logits, scale, row_max, row_sum)
    return row_max, row_sum, add_values(weight, decay, value, accumulator)


@triton.jit
def weigh_tile(logits, scale, row_max, row_sum):
    """Returns (row_max, row_sum, weight [ROW, KEY], decay [ROW]) after one more tile of logits.

    decay: what the weights before count now.
    """
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
    # a row that sees nothing yet would compute -inf - -inf
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(logits * scale[:, None] - anchor[:, None])
    decay = tl.exp2(row_max - anchor)
    if len(row_sum.shape) == 2:
        row_sum = row_sum * decay[:, None] + weight
    else:
        row_sum = row_sum * decay + tl.sum(weight, axis=1)
    return new_max, row_sum, weight, decay


@triton.jit
def add_values(weight, decay, value, accumulator):
    """Returns the weighted sum of values after one more tile of them, see `weigh_tile`."""
    if IS_INTERPRETING and value[0].dtype == tl.bfloat16:
        value = convert_columns(value, tl.float32)
    weight, sums = weight.to(value[0].dtype), ()
    for index in tl.static_range(len(value)):
        sums += (tl.dot(weight, value[index], accumulator[index] * decay[:, None], input_precision="ieee"),)
    return sums


@triton.jit
def total_sums(row_sum):
    """Returns the sums of exponentials [ROW] of rows that may have one for each key of a tile, see `start_rows`."""
    return tl.sum(row_sum, axis=1) if len(row_sum.shape) == 2 else row_sum


@triton.jit
def _soft_capped(logits, cap):
    """Returns cap * tanh(logits / cap), from 1 - 2 / (e^2x + 1), which is tanh(x) at both ends.

    Its error is about cap * 1e-7.
    """
    power = tl.exp2(logits * (2.0 * 1.4426950408889634 / cap))
    return cap * (1.0 - 2.0 / (power + 1.0))


@triton.jit
def add_sink(row_max, row_sum, accumulator, sink):
    """Returns the state after one more logit [ROW], in base 2, that has no value."""
    new_max = tl.maximum(row_max, sink)
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - anchor)
    return new_max, row_sum * decay + tl.exp2(sink - anchor), scale_columns(accumulator, decay[:, None])


@triton.jit
def finish_rows(row_max, row_sum, accumulator):
    """Returns output in parts and lse [ROW], in base 2, of the state; 0 and -inf for rows that saw no key."""
    has_keys = row_max != float("-inf")
    has_keys |= row_sum != 0.0  # NaN logits leave the maximum at -inf
    divisor = tl.where(has_keys, row_sum, 1.0)
    lse = tl.where(has_keys, row_max + tl.log2(divisor), float("-inf"))
    return scale_columns(accumulator, (1.0 / divisor)[:, None]), lse


@triton.jit
def merge_rows(row_max, row_sum, accumulator, lse, output):
    """Returns the state after partial results of more keys: lse [ROW, PART], in base 2, and output [ROW, PART, DIM].

    accumulator, one part: of the same columns.
    """
    new_max = tl.maximum(row_max, tl.max(lse, axis=1))
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - anchor)
    weight = tl.exp2(lse - anchor[:, None])
    row_sum = row_sum * decay + tl.sum(weight, axis=1)
    return new_max, row_sum, (accumulator[0] * decay[:, None] + tl.sum(weight[:, :, None] * output, axis=1),)


def tuned_for(tuned: dict, head_dim: int, is_float8: bool = False) -> dict:
    """Returns an op's tuning row for heads of this size and keys of this type.
    Its entries `wide`, `float8` and `widest`, in this order, say what differs there; the last is for heads past 256."""
    is_wide = "wide" in tuned and head_dim > tuned["wide"]["above"]
    for kind, counts in (("wide", is_wide), ("float8", is_float8), ("widest", head_dim > 256)):
        if counts:
            tuned = tuned | tuned.get(kind, {})
    return tuned


def tile_sizes(num_rows: int, head_dim: int, element_bytes: int, tuned: dict) -> tuple[int, int]:
    """Returns BLOCK_ROW and BLOCK_KEY for query rows that share a KV head, within an op's tuning row.

    A tile of keys takes at most `tile_bytes` of shared memory; fp32 products run on the plain floating-point units,
    where more than 16 rows only cost registers.
    """
    # a power of two, as all sizes of tiles
    most_keys = next_power_of_2(tuned["tile_bytes"] // (num_columns(head_dim) * element_bytes) + 1) // 2
    block_row = min(max(tuned["min_rows"], next_power_of_2(num_rows)), tuned["max_rows"])
    return block_row if element_bytes <= 2 else 16, min(max(16, most_keys), 64)
