"""The second product of experts, times the router's weights."""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import load_tile, multiply
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .blocks import find_block
from .layer import Product, Shape, add_bias, columns_of


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    product, factors_ptr, table, num_pairs, SHAPE: tl.constexpr, LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr,
    BLOCK_OUTPUT: tl.constexpr, BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies the activated rows of a block by BLOCK_OUTPUT rows of weight, and by the router's weights. The first
    tile of weights is asked for before the rows are there."""
    NUM_BLOCKS: tl.constexpr = (SHAPE.HIDDEN + BLOCK_OUTPUT - 1) // BLOCK_OUTPUT
    block = find_block(table, tl.program_id(0) // NUM_BLOCKS, num_pairs, SHAPE.NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_output = block.is_one & (output < SHAPE.HIDDEN)
    weight_row = block.expert.to(tl.int64) * SHAPE.HIDDEN + output
    weight_ptrs = product.weight + weight_row * SHAPE.INNER
    columns = tl.arange(0, BLOCK_COLUMN)
    IS_EVEN: tl.constexpr = SHAPE.INNER % BLOCK_COLUMN == 0
    weight = load_tile(weight_ptrs, is_output, columns, SHAPE.INNER, IS_EVEN, "evict_first")
    await_predecessor(ENABLE_PDL)
    if not block.is_one:
        return
    row_ptrs = product.x + block.pair.to(tl.int64) * SHAPE.INNER
    row = load_tile(row_ptrs, block.is_pair, columns, SHAPE.INNER, IS_EVEN, "evict_last")
    total = multiply(weight, row, tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32))
    for begin in tl.range(BLOCK_COLUMN, SHAPE.INNER, BLOCK_COLUMN, num_stages=NUM_STAGES):
        weight = load_tile(weight_ptrs, is_output, begin + columns, SHAPE.INNER, IS_EVEN, "evict_first")
        row = load_tile(row_ptrs, block.is_pair, begin + columns, SHAPE.INNER, IS_EVEN, "evict_last")
        total = multiply(weight, row, total)
    total = add_bias(total, product.bias, weight_row, is_output)
    total *= tl.load(factors_ptr + block.pair, mask=block.is_pair, other=0.0)[None, :]
    part_ptrs = product.output + block.pair.to(tl.int64)[None, :] * SHAPE.HIDDEN + output[:, None]
    tl.store(part_ptrs, total, mask=is_output[:, None] & block.is_pair[None, :])


def launch_down(
    op: str, product: Product, factors: torch.Tensor, shape: Shape, blocks: dict, tuned: dict
) -> None:  # fmt: skip
    """Launches the kernel above. factors: the router's weights. blocks: see `launch_gate_up`."""
    num_programs = triton.cdiv(shape.HIDDEN, tuned["down_block_output"])
    launch(
        op, _down_kernel, (blocks.pop("num_blocks") * num_programs,),
        product=product, factors_ptr=factors, SHAPE=shape, BLOCK_OUTPUT=tuned["down_block_output"],
        BLOCK_COLUMN=columns_of(tuned["block_column"], shape.INNER), NUM_STAGES=tuned["down_num_stages"],
        num_warps=tuned["down_num_warps"], **blocks,
    )  # fmt: skip
