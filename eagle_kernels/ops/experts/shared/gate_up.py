"""The first product of experts, and the activation."""

from ....primitives.dependent_launch import await_predecessor
from ....primitives.quantised import Format
from ....primitives.strides import row_unit
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


@triton.jit
def _activate(gate, up, SHAPE: tl.constexpr):
    if SHAPE.IS_CLAMPED:
        # NaN stays one
        gate = tl.where(gate > SHAPE.LIMIT, SHAPE.LIMIT, gate)
        up = tl.where(up > SHAPE.LIMIT, SHAPE.LIMIT, tl.where(up < -SHAPE.LIMIT, -SHAPE.LIMIT, up))
        return gate / (1.0 + tl.exp(-SHAPE.ALPHA * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_pairs", "stride_x_row", "stride_numbers"])
def _gate_up_kernel(
    product, table, num_pairs, stride_x_row, stride_numbers, UNIT: tl.constexpr, SHAPE: tl.constexpr,
    FORMAT: tl.constexpr, LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr, BLOCK_OUTPUT: tl.constexpr,
    BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of a block by BLOCK_OUTPUT rows of gates and those of up, in one product, and activates."""
    await_predecessor(ENABLE_PDL)
    NUM_BLOCKS: tl.constexpr = (SHAPE.INNER + BLOCK_OUTPUT - 1) // BLOCK_OUTPUT
    block = find_block(table, tl.program_id(0) // NUM_BLOCKS, num_pairs, SHAPE.NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    if not block.is_one:
        return
    # rows of gates and of up take turns by eight, so that a thread of the tensor cores has both of an output
    lane = tl.arange(0, 2 * BLOCK_OUTPUT)
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + lane // 16 * 8 + lane % 8
    known, is_up = tl.minimum(output, SHAPE.INNER - 1), lane // 8 % 2  # known: which has scales and biases
    row = block.expert.to(tl.int64) * (2 * SHAPE.INNER)
    row += 2 * known + is_up if SHAPE.IS_INTERLEAVED else known + is_up * SHAPE.INNER
    weight_ptrs = find_rows(product.weight, row, SHAPE.HIDDEN, FORMAT)
    x_row_ptrs = product.x + (block.pair // SHAPE.NUM_CHOSEN).to(tl.int64) * stride_x_row * UNIT
    total = tl.zeros([2 * BLOCK_OUTPUT, BLOCK_PAIR], tl.float32)
    NUM_TILES: tl.constexpr = (SHAPE.HIDDEN + BLOCK_COLUMN - 1) // BLOCK_COLUMN
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        weights = load_weights(weight_ptrs, output < SHAPE.INNER, tile, SHAPE.HIDDEN, BLOCK_COLUMN, FORMAT)
        x = load_rows(x_row_ptrs, block.is_pair, tile, SHAPE.HIDDEN, BLOCK_COLUMN)
        total = add_tile(total, weights, x, product, tile, row, stride_numbers, FORMAT)
    total = finish_sums(total, product, row, FORMAT)
    pairs = tl.permute(tl.reshape(total, (BLOCK_OUTPUT // 8, 2, 8, BLOCK_PAIR)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(pairs, (BLOCK_OUTPUT, BLOCK_PAIR, 2)))
    activated = _activate(gate, up, SHAPE).to(product.output.dtype.element_ty)
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    output_ptrs = product.output + block.pair.to(tl.int64)[None, :] * SHAPE.INNER + output[:, None]
    tl.store(output_ptrs, activated, mask=(output < SHAPE.INNER)[:, None] & block.is_pair[None, :])


def launch_gate_up(op: str, product: Product, shape: Shape, made: Format, blocks: dict, tuned: dict) -> None:
    """Launches the kernel above. blocks: arguments of `find_block`, and under num_blocks how many there may be."""
    unit, num_programs = row_unit(product.x), triton.cdiv(shape.INNER, tuned["block_output"])
    launch(
        op, _gate_up_kernel, (blocks.pop("num_blocks") * num_programs,),
        product=product, stride_x_row=product.x.stride(0) // unit, stride_numbers=stride_of(product.scales), UNIT=unit,
        SHAPE=shape, FORMAT=made, BLOCK_OUTPUT=tuned["block_output"],
        BLOCK_COLUMN=columns_of(tuned["block_column"], shape.HIDDEN, made.BITS), NUM_STAGES=tuned["num_stages"],
        num_warps=tuned["num_warps"], **blocks,
    )  # fmt: skip
