"""The second product of experts, times the router's weights."""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.quantised import Format
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .blocks import find_block
from .layer import (
    Product,
    Shape,
    add_tile,
    columns_of,
    find_rows,
    finish_sums,
    load_rows,
    load_weights,
    stride_of,
)


@triton.jit(do_not_specialize=["num_pairs", "stride_numbers"])
def _down_kernel(
    product, factors_ptr, table, num_pairs, stride_numbers, SHAPE: tl.constexpr, FORMAT: tl.constexpr,
    LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr, BLOCK_OUTPUT: tl.constexpr, BLOCK_COLUMN: tl.constexpr,
    NUM_STAGES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies the activated rows of a block by BLOCK_OUTPUT rows of weight, and by the router's weights. The first
    tile of weights is asked for before the rows are there."""
    NUM_BLOCKS: tl.constexpr = (SHAPE.HIDDEN + BLOCK_OUTPUT - 1) // BLOCK_OUTPUT
    block = find_block(table, tl.program_id(0) // NUM_BLOCKS, num_pairs, SHAPE.NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_output = block.is_one & (output < SHAPE.HIDDEN)
    # past the end the last one, which has a scale and a bias
    weight_row = block.expert.to(tl.int64) * SHAPE.HIDDEN + tl.minimum(output, SHAPE.HIDDEN - 1)
    weight_ptrs = find_rows(product.weight, weight_row, SHAPE.INNER, FORMAT)
    weights = load_weights(weight_ptrs, is_output, 0, SHAPE.INNER, BLOCK_COLUMN, FORMAT)
    await_predecessor(ENABLE_PDL)
    if not block.is_one:
        return
    row_ptrs = product.x + block.pair.to(tl.int64) * SHAPE.INNER
    row = load_rows(row_ptrs, block.is_pair, 0, SHAPE.INNER, BLOCK_COLUMN)
    total = tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32)
    total = add_tile(total, weights, row, product, 0, weight_row, stride_numbers, FORMAT)
    NUM_TILES: tl.constexpr = (SHAPE.INNER + BLOCK_COLUMN - 1) // BLOCK_COLUMN
    for tile in tl.range(1, NUM_TILES, num_stages=NUM_STAGES):
        weights = load_weights(weight_ptrs, is_output, tile, SHAPE.INNER, BLOCK_COLUMN, FORMAT)
        row = load_rows(row_ptrs, block.is_pair, tile, SHAPE.INNER, BLOCK_COLUMN)
        total = add_tile(total, weights, row, product, tile, weight_row, stride_numbers, FORMAT)
    total = finish_sums(total, product, weight_row, FORMAT)
    total *= tl.load(factors_ptr + block.pair, mask=block.is_pair, other=0.0)[None, :]
    part_ptrs = product.output + block.pair.to(tl.int64)[None, :] * SHAPE.HIDDEN + output[:, None]
    tl.store(part_ptrs, total, mask=is_output[:, None] & block.is_pair[None, :])


def launch_down(
    op: str, product: Product, factors: torch.Tensor, shape: Shape, made: Format, blocks: dict, tuned: dict
) -> None:  # fmt: skip
    """Launches the kernel above. factors: the router's weights. blocks: see `launch_gate_up`."""
    num_programs = triton.cdiv(shape.HIDDEN, tuned["down_block_output"])
    launch(
        op, _down_kernel, (blocks.pop("num_blocks") * num_programs,),
        product=product, factors_ptr=factors, stride_numbers=stride_of(product.scales), SHAPE=shape, FORMAT=made,
        BLOCK_OUTPUT=tuned["down_block_output"], NUM_STAGES=tuned["down_num_stages"], num_warps=tuned["down_num_warps"],
        BLOCK_COLUMN=columns_of(tuned["down_block_column"], shape.INNER, made.BITS), **blocks,
    )  # fmt: skip
