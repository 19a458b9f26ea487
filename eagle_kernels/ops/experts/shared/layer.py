"""What both products of experts have in common: pointers, sizes, tiles of weights in any format.

The rows of all experts are those of one layer, in 16 bit [E * N, K], or in the words of quantised weights. Tiles of
these are 128 columns wide.
"""

from typing import Any, NamedTuple

import torch

from ....primitives.products import load_tile, multiply
from ....primitives.quantised import add_block, load_numbers
from ....runtime.language import next_power_of_2, tl, triton


class Product(NamedTuple):
    """Pointers to what a product reads and writes; see `fused_experts`."""

    x: Any  # of the second one, the activated rows [T * K, I]
    weight: Any
    scales: Any  # None: weights are in 16 bit
    zeros: Any
    bias: Any  # None: not given
    output: Any


class Shape(NamedTuple):
    """Sizes and options that are constants of the kernels."""

    NUM_EXPERTS: int
    NUM_CHOSEN: int
    HIDDEN: int
    INNER: int
    IS_INTERLEAVED: bool
    IS_CLAMPED: bool
    ALPHA: float
    LIMIT: float


@triton.jit
def find_rows(weight_ptr, row, NUM_COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns where these rows of weights begin."""
    if FORMAT.BITS == 16:
        return weight_ptr + row * NUM_COLUMNS
    else:
        WORDS: tl.constexpr = 4 * FORMAT.BITS
        NUM_BLOCKS: tl.constexpr = (NUM_COLUMNS + 128 - 1) // 128
        return weight_ptr + row // 16 * (NUM_BLOCKS * 16 * WORDS) + row % 16 * WORDS


@triton.jit
def load_weights(
    row_ptrs, is_row, tile, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMN: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Loads a tile of weights [ROW, COLUMN], or its words."""
    if FORMAT.BITS == 16:
        IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
        columns = tile * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
        return load_tile(row_ptrs, is_row, columns, NUM_COLUMNS, IS_EVEN, "evict_first")
    else:
        WORDS: tl.constexpr = 4 * FORMAT.BITS
        words = tile * (16 * WORDS) + tl.arange(0, WORDS)
        return load_tile(row_ptrs, is_row, words, NUM_COLUMNS, True, "evict_first")


@triton.jit
def load_rows(row_ptrs, is_row, tile, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMN: tl.constexpr):
    """Loads the part of rows [ROW, COLUMN] that meets a tile of weights."""
    IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
    columns = tile * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
    return load_tile(row_ptrs, is_row, columns, NUM_COLUMNS, IS_EVEN, "evict_last")


@triton.jit
def add_tile(total, weights, x, product, tile, row, stride_numbers, FORMAT: tl.constexpr):
    """Returns sums [OUTPUT, PAIR] plus the products of a tile of the rows of weights and x [PAIR, COLUMN]."""
    if FORMAT.BITS == 16:
        return multiply(weights, x, total)
    else:
        numbers = load_numbers(product, tl.cast(tile, tl.int32), row, stride_numbers, FORMAT)
        return add_block(total, weights, x, 1.0, numbers, FORMAT, False)


@triton.jit
def finish_sums(total, product, row, FORMAT: tl.constexpr):
    """Returns sums [OUTPUT, PAIR] with what is the same for a whole row of weights: its scale, and the bias."""
    if FORMAT.BITS < 16 and FORMAT.GROUP == 0:
        total *= tl.load(product.scales + row).to(tl.float32)[:, None]
    if product.bias is not None:
        total += tl.load(product.bias + row).to(tl.float32)[:, None]
    return total


def columns_of(block_column: int, num_columns: int, bits: int) -> int:
    """Returns the columns of a tile: no more than there are, but 16, which the tensor cores take at least."""
    return min(block_column, next_power_of_2(num_columns, 16)) if bits == 16 else 128


def stride_of(scales: torch.Tensor | None) -> int:
    """Returns how far numbers of the next groups or blocks lie from those of these; scales: as kernels take them."""
    return scales.stride(0) if scales is not None and scales.dim() == 3 else 0
