"""Online softmax over tiles of keys, and the merge of results that were computed over disjoint sets of keys.

Attention over a long KV cache is split over programs. Each keeps, per query row, the largest logit so far, the sum of
exponentials relative to it, and the weighted sum of values (Milakov & Gimelshein, arXiv 1805.02867); the partial
results merge by their log-sum-exp (Flash-Decoding). Inside a program logits are in base 2, as GPUs compute exp2.
"""

from __future__ import annotations

from ..runtime.language import tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def start_rows(BLOCK_ROW: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The state of rows that have seen no key: largest logit, sum of exponentials, weighted sum of values."""
    row_max = tl.full([BLOCK_ROW], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROW], tl.float32)
    accumulator = tl.zeros([BLOCK_ROW, BLOCK_DIM], tl.float32)
    return row_max, row_sum, accumulator


@triton.jit
def attend(query, key, value, is_visible, scale, row_max, row_sum, accumulator, IS_WIDENED: tl.constexpr):
    """Rows query [ROW, DIM] attend to one more tile, key and value [KEY, DIM], where is_visible [ROW or 1, KEY].

    `scale` includes log2(e). Keys that nobody sees must be finite (loaded as 0): their weight is 0, but 0 * NaN is NaN.
    IS_WIDENED: multiply in fp32, for bfloat16 in Triton's interpreter, whose tl.dot takes it for integers.
    """
    if IS_WIDENED:
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    logits = tl.where(is_visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, axis=1))
    # a row that sees nothing yet would compute -inf - -inf
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(logits - anchor[:, None])
    decay = tl.exp2(row_max - anchor)
    row_sum = row_sum * decay + tl.sum(weight, axis=1)
    accumulator = tl.dot(weight.to(value.dtype), value, accumulator * decay[:, None], input_precision="ieee")
    return new_max, row_sum, accumulator


@triton.jit
def finish_rows(row_max, row_sum, accumulator):
    """output [ROW, DIM] and natural-log lse [ROW] of the state; 0 and -inf for rows that saw no key."""
    has_keys = row_max != float("-inf")
    has_keys |= row_sum != 0.0  # NaN logits leave the maximum at -inf
    divisor = tl.where(has_keys, row_sum, 1.0)
    lse = tl.where(has_keys, (row_max + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    return accumulator / divisor[:, None], lse


@triton.jit
def merge_splits(
    partial_output_ptr,
    partial_lse_ptr,
    row,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLIT: tl.constexpr,
):
    """output [BLOCK_DIM] and lse of one row of partial_output [rows, splits, HEAD_DIM] and partial_lse [rows, splits].

    A split with lse -inf saw no key; its partial output was not written and is not read.
    """
    split = tl.arange(0, BLOCK_SPLIT)
    column = tl.arange(0, BLOCK_DIM)
    place = row * num_splits + split
    partial_lse = tl.load(partial_lse_ptr + place, mask=split < num_splits, other=float("-inf"))
    has_keys = partial_lse != float("-inf")
    partial_output = tl.load(
        partial_output_ptr + place[:, None] * HEAD_DIM + column[None, :],
        mask=has_keys[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )
    largest = tl.max(partial_lse)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(partial_lse - anchor)
    total = tl.sum(weight)
    is_empty = total == 0.0
    output = tl.sum(weight[:, None] * partial_output, axis=0) / tl.where(is_empty, 1.0, total)
    return output, tl.where(is_empty, float("-inf"), anchor + tl.log(tl.where(is_empty, 1.0, total)))


def tile_sizes(num_rows: int, head_dim: int, element_bytes: int, limits: dict) -> dict:
    """BLOCK_ROW, BLOCK_KEY, BLOCK_DIM for query rows that share a KV head, within an op's tuning row.

    A tile of keys takes at most `tile_bytes` of shared memory and lies within one 64-bit mask word; fp32 products run
    on the plain floating-point units, where more than 16 rows only cost registers.
    """
    block_dim = max(16, triton.next_power_of_2(head_dim))
    most_rows = limits["max_rows"] if element_bytes <= 2 else 16
    return {
        "BLOCK_ROW": min(max(16, triton.next_power_of_2(num_rows)), most_rows),
        "BLOCK_KEY": min(max(16, limits["tile_bytes"] // (block_dim * element_bytes)), 64),
        "BLOCK_DIM": block_dim,
    }


def split_count(num_programs: int, max_keys: int, limits: dict) -> int:
    """Over how many programs each request's keys are split, from sizes alone, so that a captured graph stays valid.

    num_programs: programs without splitting; max_keys: the keys that a request can have.
    """
    wanted = -(-limits["programs"] // max(num_programs, 1))
    useful = -(-max_keys // limits["split_keys"])
    return max(1, min(wanted, useful, limits["max_splits"]))
