"""What both products of experts have in common: pointers, sizes, biases."""

from typing import Any, NamedTuple

from ....runtime.language import next_power_of_2, tl, triton


class Product(NamedTuple):
    """Pointers to what a product reads and writes; see `fused_experts`."""

    x: Any  # of the second one, the activated rows [T * K, I]
    weight: Any
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
def add_bias(total, bias_ptr, row, is_output):
    """Returns sums [OUTPUT, PAIR] with the bias of their rows of weights, if there is one."""
    if bias_ptr is None:
        return total
    else:
        return total + tl.load(bias_ptr + row, mask=is_output, other=0.0).to(tl.float32)[:, None]


def columns_of(block_column: int, num_columns: int) -> int:
    """Returns the columns of a tile: no more than there are, but 16, which the tensor cores take at least."""
    return min(block_column, next_power_of_2(num_columns, 16))
