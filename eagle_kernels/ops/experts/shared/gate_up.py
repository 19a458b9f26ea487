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
    """Multiplies the rows of a block by BLOCK_OUTPUT rows of gates and those of up, and activates."""
    await_predecessor(ENABLE_PDL)
    NUM_BLOCKS: tl.constexpr = (SHAPE.INNER + BLOCK_OUTPUT - 1) // BLOCK_OUTPUT
    block = find_block(table, tl.program_id(0) // NUM_BLOCKS, num_pairs, SHAPE.NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    if not block.is_one:
        return
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_output = output < SHAPE.INNER
    known = tl.minimum(output, SHAPE.INNER - 1)  # which has scales and biases
    first_row = block.expert.to(tl.int64) * (2 * SHAPE.INNER)
    gate_row = first_row + (2 * known if SHAPE.IS_INTERLEAVED else known)
    up_row = gate_row + (1 if SHAPE.IS_INTERLEAVED else SHAPE.INNER)
    gate_ptrs = find_rows(product.weight, gate_row, SHAPE.HIDDEN, FORMAT)
    up_ptrs = find_rows(product.weight, up_row, SHAPE.HIDDEN, FORMAT)
    x_row_ptrs = product.x + (block.pair // SHAPE.NUM_CHOSEN).to(tl.int64) * stride_x_row * UNIT
    gate, up = tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32), tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32)
    NUM_TILES: tl.constexpr = (SHAPE.HIDDEN + BLOCK_COLUMN - 1) // BLOCK_COLUMN
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        gates = load_weights(gate_ptrs, is_output, tile, SHAPE.HIDDEN, BLOCK_COLUMN, FORMAT)
        ups = load_weights(up_ptrs, is_output, tile, SHAPE.HIDDEN, BLOCK_COLUMN, FORMAT)
        x = load_rows(x_row_ptrs, block.is_pair, tile, SHAPE.HIDDEN, BLOCK_COLUMN)
        gate = add_tile(gate, gates, x, product, tile, gate_row, stride_numbers, FORMAT)
        up = add_tile(up, ups, x, product, tile, up_row, stride_numbers, FORMAT)
    gate, up = finish_sums(gate, product, gate_row, FORMAT), finish_sums(up, product, up_row, FORMAT)
    activated = _activate(gate, up, SHAPE).to(product.output.dtype.element_ty)
    output_ptrs = product.output + block.pair.to(tl.int64)[None, :] * SHAPE.INNER + output[:, None]
    tl.store(output_ptrs, activated, mask=is_output[:, None] & block.is_pair[None, :])


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
