"""The first product of experts, and the activation."""

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import load_tile, multiply
from ....primitives.strides import row_unit
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .blocks import find_block
from .layer import Product, Shape, add_bias, columns_of


@triton.jit
def _activate(gate, up, SHAPE: tl.constexpr):
    if SHAPE.IS_CLAMPED:
        # NaN stays one
        gate = tl.where(gate > SHAPE.LIMIT, SHAPE.LIMIT, gate)
        up = tl.where(up > SHAPE.LIMIT, SHAPE.LIMIT, tl.where(up < -SHAPE.LIMIT, -SHAPE.LIMIT, up))
        return gate / (1.0 + tl.exp(-SHAPE.ALPHA * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_pairs", "stride_x_row"])
def _gate_up_kernel(
    product, table, num_pairs, stride_x_row, UNIT: tl.constexpr, SHAPE: tl.constexpr, LOOKUP: tl.constexpr,
    BLOCK_PAIR: tl.constexpr, BLOCK_OUTPUT: tl.constexpr, BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of a block by BLOCK_OUTPUT rows of gates and those of up, and activates."""
    await_predecessor(ENABLE_PDL)
    NUM_BLOCKS: tl.constexpr = (SHAPE.INNER + BLOCK_OUTPUT - 1) // BLOCK_OUTPUT
    block = find_block(table, tl.program_id(0) // NUM_BLOCKS, num_pairs, SHAPE.NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    if not block.is_one:
        return
    output = tl.program_id(0) % NUM_BLOCKS * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_output = output < SHAPE.INNER
    first_row = block.expert.to(tl.int64) * (2 * SHAPE.INNER)
    gate_row = first_row + (2 * output if SHAPE.IS_INTERLEAVED else output)
    up_row = gate_row + (1 if SHAPE.IS_INTERLEAVED else SHAPE.INNER)
    gate_ptrs, up_ptrs = product.weight + gate_row * SHAPE.HIDDEN, product.weight + up_row * SHAPE.HIDDEN
    x_row_ptrs = product.x + (block.pair // SHAPE.NUM_CHOSEN).to(tl.int64) * stride_x_row * UNIT
    gate, up = tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32), tl.zeros([BLOCK_OUTPUT, BLOCK_PAIR], tl.float32)
    IS_EVEN: tl.constexpr = SHAPE.HIDDEN % BLOCK_COLUMN == 0
    for begin in tl.range(0, SHAPE.HIDDEN, BLOCK_COLUMN, num_stages=NUM_STAGES):
        columns = begin + tl.arange(0, BLOCK_COLUMN)
        gate_weight = load_tile(gate_ptrs, is_output, columns, SHAPE.HIDDEN, IS_EVEN, "evict_first")
        up_weight = load_tile(up_ptrs, is_output, columns, SHAPE.HIDDEN, IS_EVEN, "evict_first")
        x = load_tile(x_row_ptrs, block.is_pair, columns, SHAPE.HIDDEN, IS_EVEN, "evict_last")
        gate, up = multiply(gate_weight, x, gate), multiply(up_weight, x, up)
    gate = add_bias(gate, product.bias, gate_row, is_output)
    up = add_bias(up, product.bias, up_row, is_output)
    activated = _activate(gate, up, SHAPE).to(product.output.dtype.element_ty)
    output_ptrs = product.output + block.pair.to(tl.int64)[None, :] * SHAPE.INNER + output[:, None]
    tl.store(output_ptrs, activated, mask=is_output[:, None] & block.is_pair[None, :])


def launch_gate_up(op: str, product: Product, shape: Shape, blocks: dict, tuned: dict) -> None:
    """Launches the kernel above. blocks: arguments of `find_block`, and under num_blocks how many there may be."""
    unit, num_programs = row_unit(product.x), triton.cdiv(shape.INNER, tuned["block_output"])
    launch(
        op, _gate_up_kernel, (blocks.pop("num_blocks") * num_programs,),
        product=product, stride_x_row=product.x.stride(0) // unit, UNIT=unit, SHAPE=shape,
        BLOCK_OUTPUT=tuned["block_output"], BLOCK_COLUMN=columns_of(tuned["block_column"], shape.HIDDEN),
        NUM_STAGES=tuned["num_stages"], num_warps=tuned["num_warps"], **blocks,
    )  # fmt: skip
