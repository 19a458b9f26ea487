"""linear_decode for up to 256 rows of fp16 or bf16, in one tile of rows or two, so that weights are read once.

A program makes a block of outputs of a tile of rows, or a part of the columns of it (`tiles.py`).

Every sum is made column by column in one order, the first PART_COLUMNS of a part last, whatever the number of rows: a
row's bits depend on the weights and on num_parts alone.
"""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import load_tile, stream_weight
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .layer import SIZES, Layer, choose_tuning, layer_arguments
from .tiles import columns_of_part, deal_outputs, place_of_program, store_tile

MAX_ROWS = 256

# The first entry is taken that allows the number of rows and of outputs. prefetched: the first tile of weights is kept
# in registers, which larger tiles need for their sums.
_TILE = {"max_rows": MAX_ROWS, "least_outputs": 0, "block_row": MAX_ROWS, "block_output": 64, "block_column": 64,
         "prefetched": False, "num_warps": 4, "num_stages": 3}  # fmt: skip
_FEW = {rows: {"max_rows": rows, "block_row": rows} for rows in (16, 32, 64)}
_HOPPER = _TILE | {"block_column": 128, "num_stages": 4}
_HOPPER_WIDE = _HOPPER | {"least_outputs": 16384, "block_output": 128, "num_warps": 8}
_HOPPER_DEEP = _HOPPER | {"least_outputs": 5120, "num_stages": 6}
# bench/results/NVIDIA_H200/tuning/linear_decode.txt; for 8 and 16 rows an H100 has the same best entries
TUNING = {
    "default": (_TILE | _FEW[64], _TILE),
    # 64 KiB of shared memory
    "gfx942": (_TILE | _FEW[64], _TILE | {"num_stages": 2}),
    "sm_90": (
        _HOPPER_WIDE | _FEW[16],
        _HOPPER_DEEP | _FEW[16] | {"prefetched": True},
        _HOPPER | _FEW[16] | {"prefetched": True},
        _HOPPER_WIDE | _FEW[32],
        _HOPPER_DEEP | _FEW[32],
        _HOPPER | _FEW[32] | {"prefetched": True},
        _HOPPER_WIDE | _FEW[64],
        _HOPPER_DEEP | _FEW[64],
        _HOPPER | _FEW[64],
        _TILE | {"least_outputs": 16384, "block_output": 128, "num_warps": 8, "num_stages": 4},
        # arithmetic counts, not memory: a tile for each SM
        _TILE | {"block_row": 128, "block_output": 128, "num_warps": 8, "num_stages": 4},
    ),
}
# fast_rows: up to how many rows this is faster than cuBLAS. fast_outputs: from how many outputs on it is faster than
# few_rows for 2 to 16 rows. Where neither was measured it is never preferred.
MACHINES = {"default": {"fast_rows": 0, "fast_outputs": 2**31}, "sm_90": {"fast_rows": 64, "fast_outputs": 5120}}


@triton.jit(do_not_specialize=[*SIZES, "outputs_each", "stride_output_part"])
def _linear_decode_tiles_kernel(
    layer, num_rows, num_outputs, outputs_each, stride_x_row, stride_weight_output, stride_output_row,
    stride_output_part,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_ROW: tl.constexpr,
    BLOCK_OUTPUT: tl.constexpr, BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_WEIGHT: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_ROW rows by outputs_each rows of weight, in one part of the columns.
    PREFETCH_WEIGHT: the first tile of weights, PART_COLUMNS wide, is asked for before x is there, and kept for last."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    row_block, block, part = place_of_program(num_rows, num_outputs, outputs_each, BLOCK_ROW)
    first, stop = columns_of_part(part, NUM_COLUMNS, NUM_PARTS)
    num_tiles = tl.cdiv(stop - first, BLOCK_COLUMN)
    lane = tl.arange(0, BLOCK_OUTPUT)
    output = block * outputs_each + lane
    is_output = (lane < outputs_each) & (output < num_outputs)
    columns = first + tl.arange(0, BLOCK_COLUMN)
    IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
    weight_row_ptrs = layer.weight + output.to(tl.int64) * stride_weight_output * UNIT
    first_weight = None
    if PREFETCH_WEIGHT:
        first_weight = load_tile(weight_row_ptrs, is_output, columns, NUM_COLUMNS, IS_EVEN, "evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    row = row_block * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    is_row = row < num_rows
    x_row_ptrs = layer.x + row.to(tl.int64) * stride_x_row * UNIT
    total = stream_weight(
        weight_row_ptrs, is_output, x_row_ptrs, is_row, columns, num_tiles, first_weight,
        NUM_COLUMNS=NUM_COLUMNS, BLOCK_COLUMN=BLOCK_COLUMN, NUM_STAGES=NUM_STAGES,
    )  # fmt: skip
    store_tile(layer, total, part, output, is_output, row, is_row, (stride_output_part, stride_output_row))


def is_fast(num_rows: int, device: torch.device) -> bool:
    """Returns whether this many rows were measured to be faster than in cuBLAS."""
    return num_rows <= tuning.row(MACHINES, device)["fast_rows"]


def is_best(num_rows: int, weight: torch.Tensor) -> bool:
    """Returns whether this is faster than `few_rows` where both can be taken; the same for 2 to 16 rows."""
    return num_rows > 1 and weight.shape[0] >= tuning.row(MACHINES, weight.device)["fast_outputs"]


def launch_many_rows(layer: Layer, prefetch_weight: bool) -> None:
    """Launches the kernel above into an output [T, N], or [parts, T, N] fp32."""
    num_rows, num_outputs, out = layer.x.shape[0], layer.weight.shape[0], layer.output
    tuned = choose_tuning(TUNING, layer)
    num_parts, num_row_blocks = 1 if out.dim() == 2 else len(out), triton.cdiv(num_rows, tuned["block_row"])
    block_output = tuned["block_output"]
    outputs_each = deal_outputs(num_outputs, block_output, num_parts * num_row_blocks, out.device)
    launch(
        "linear_decode", _linear_decode_tiles_kernel,
        (triton.cdiv(num_outputs, outputs_each) * num_parts * num_row_blocks,),
        outputs_each=outputs_each, stride_output_part=out.stride(0) if out.dim() == 3 else 0,
        NUM_PARTS=num_parts, BLOCK_ROW=tuned["block_row"], BLOCK_OUTPUT=block_output,
        BLOCK_COLUMN=tuned["block_column"], NUM_STAGES=tuned["num_stages"],
        PREFETCH_WEIGHT=bool(prefetch_weight and tuned["prefetched"]), num_warps=tuned["num_warps"],
        **layer_arguments(layer),
    )  # fmt: skip
