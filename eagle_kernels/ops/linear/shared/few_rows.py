"""linear_decode for few rows: up to 16 on the tensor cores, one row and fp32 on the plain floating-point units.

A program reads its rows of weight from end to end and asks for the first of them before it waits for x.
"""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import multiply
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .layer import SIZES, Layer, choose_tuning, layer_arguments

# MAX_ROWS: in fp16 and bf16, on the tensor cores. MAX_SINGLE_ROWS: in fp32, which these do not have.
MAX_ROWS = 16
ROWS = tl.constexpr(MAX_ROWS)
MAX_SINGLE_ROWS = 64
# rows of a program without the tensor cores: their sums must fit into registers
PLAIN_ROWS = 4

# The first entry that allows the number of rows and of outputs is taken. Two tokens and more must get the same entry:
# it decides a row's bits. In a tile with 256 * num_warps columns every warp has 16 bytes of each row. uses_dot: on the
# tensor cores, all rows at once.
_ONE = {"max_rows": 1, "least_outputs": 0, "uses_dot": False, "block_output": 8, "block_column": 1024,
        "num_warps": 4, "num_stages": 2}  # fmt: skip
_MANY = {"max_rows": MAX_ROWS, "least_outputs": 0, "uses_dot": True, "block_output": 32, "block_column": 256,
         "num_warps": 4, "num_stages": 2}  # fmt: skip
_HOPPER = _MANY | {"block_output": 16, "block_column": 512, "num_stages": 4}
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/linear_decode.txt
TUNING = {
    "default": (_ONE, _MANY),
    # more than 5,119 outputs go to many_rows
    "sm_90": (_ONE | {"block_output": 4, "block_column": 2048, "num_warps": 8}, _HOPPER),
}
# In fp32 all rows get the same entry, the first that allows the number of columns.
_SINGLE = {"most_columns": 2**31, "uses_dot": False, "block_output": 8, "block_column": 512, "num_warps": 4,
           "num_stages": 2}  # fmt: skip
SINGLE_TUNING = {
    "default": (_SINGLE,),
    "sm_90": (_SINGLE | {"most_columns": 512, "block_column": 256, "num_warps": 1}, _SINGLE),
}


@triton.jit
def _load(row_ptr, start, column, NUM_COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, EVICTION: tl.constexpr):
    """Loads a tile of weights, or the part of one row of x that meets it.
    EVICTION: weights leave the caches first, as nothing reads them again later."""
    if IS_EVEN:
        return tl.load(row_ptr + start + column, eviction_policy=EVICTION)
    else:
        is_column = start + column < NUM_COLUMNS
        return tl.load(row_ptr + start + column, mask=is_column, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _neighbours(values):
    """Splits values [OUTPUT, COLUMN] into four tensors [OUTPUT, COLUMN // 4], one for each of the neighbours that a
    thread loads at once, always in the same order."""
    pairs = tl.reshape(values, (values.shape[0], values.shape[1] // 4, 2, 2))
    left, right = tl.split(pairs)
    return tl.split(left) + tl.split(right)


@triton.jit
def _add_products(
    totals, weight, x_ptrs, start, column, NUM_COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, VECTOR: tl.constexpr
):
    """Returns totals, [OUTPUT, COLUMN // VECTOR] for each row, plus the products of weight [OUTPUT, COLUMN] and x.
    A thread loads VECTOR neighbours at once and keeps one sum of them; a sum for each would take too many registers. In
    fp32 each product is fused explicitly with the sum before: what a compiler fuses depends on the other rows."""
    sums = ()
    for index in tl.static_range(len(totals)):
        x = _load(x_ptrs[index], start, column, NUM_COLUMNS, IS_EVEN, "")[None, :]
        if VECTOR == 4:
            weights, xs = _neighbours(weight), _neighbours(tl.broadcast_to(x, weight.shape))
            products = weights[0] * xs[0]
            for place in tl.static_range(1, VECTOR):
                products = tl.fma(weights[place], xs[place], products)
        else:  # a single row: with a fixed order ptxas loads the last weights late, which costs 10 %
            NUM_VECTORS: tl.constexpr = weight.shape[1] // VECTOR
            products = weight.to(tl.float32) * x.to(tl.float32)
            products = tl.sum(tl.reshape(products, (weight.shape[0], NUM_VECTORS, VECTOR)), axis=2)
        sums += (totals[index] + products,)  # the products wait for no other tile
    return sums


@triton.jit(do_not_specialize=SIZES)
def _linear_decode_plain_kernel(
    layer, num_rows, num_outputs, stride_x_row, stride_weight_output, stride_output_row,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_OUTPUT: tl.constexpr,
    BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_WEIGHT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_ROW rows, one by one, on the plain floating-point units, while the next tiles are loaded."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    first_row, output_block = 0, tl.program_id(0)
    if BLOCK_ROW > 1:  # neighbouring blocks read the same weights, which the first one brings into the cache
        num_row_blocks = tl.cdiv(num_rows, BLOCK_ROW)
        first_row, output_block = output_block % num_row_blocks * BLOCK_ROW, output_block // num_row_blocks
    output = output_block * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    # past the end the last row again: cheaper than a mask on every load
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMN)
    IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
    weight_row_ptr = layer.weight + (weight_row * stride_weight_output * UNIT)[:, None]
    first_weight = _load(weight_row_ptr, 0, column[None, :], NUM_COLUMNS, IS_EVEN, "evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    # neighbours that a thread loads at once
    VECTOR: tl.constexpr = 128 // layer.x.dtype.element_ty.primitive_bitwidth
    x_ptrs, totals = (), ()
    for index in tl.static_range(BLOCK_ROW):
        row = tl.minimum(first_row + index, num_rows - 1).to(tl.int64)  # as above
        x_ptrs += (layer.x + row * stride_x_row * UNIT,)
        totals += (tl.zeros([BLOCK_OUTPUT, BLOCK_COLUMN // VECTOR], tl.float32),)
    for start in tl.range(BLOCK_COLUMN, NUM_COLUMNS, BLOCK_COLUMN, num_stages=NUM_STAGES):
        weight = _load(weight_row_ptr, start, column[None, :], NUM_COLUMNS, IS_EVEN, "evict_first")
        totals = _add_products(totals, weight, x_ptrs, start, column, NUM_COLUMNS, IS_EVEN, VECTOR)
    # last, so that the loop has started to load its tiles before anything waits for x
    totals = _add_products(totals, first_weight, x_ptrs, 0, column, NUM_COLUMNS, IS_EVEN, VECTOR)

    is_output = output < num_outputs
    for index in tl.static_range(BLOCK_ROW):
        row = first_row + index
        result = tl.sum(totals[index], axis=1)
        if layer.bias is not None:
            result += tl.load(layer.bias + output, mask=is_output, other=0.0).to(tl.float32)
        output_row_ptr = layer.output + tl.cast(row, tl.int64) * stride_output_row
        is_stored = is_output & (row < num_rows)
        tl.store(output_row_ptr + output, result.to(layer.output.dtype.element_ty), mask=is_stored)


@triton.jit
def _load_rows(x_row_ptr, is_row, start, column, NUM_COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr):
    """Loads the part of all rows of x that meets a tile of weights."""
    is_read = is_row
    if not IS_EVEN:
        is_read &= start + column < NUM_COLUMNS
    return tl.load(x_row_ptr + start + column, mask=is_read, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def _linear_decode_rows_kernel(
    layer, num_rows, num_outputs, stride_x_row, stride_weight_output, stride_output_row,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_OUTPUT: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_WEIGHT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies up to ROWS rows on the tensor cores. Every warp has columns of its own, a part, which keeps all
    warps busy with few outputs; the parts' sums are added up last."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    output = tl.program_id(0) * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    # past the end the last row again: cheaper than a mask on every load
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    part, lane = tl.arange(0, NUM_PARTS), tl.arange(0, BLOCK_COLUMN)
    column = part[:, None, None] * BLOCK_COLUMN + lane[None, None, :]
    STEP: tl.constexpr = NUM_PARTS * BLOCK_COLUMN
    IS_EVEN: tl.constexpr = NUM_COLUMNS % STEP == 0
    weight_row_ptr = layer.weight + (weight_row * stride_weight_output * UNIT)[None, :, None]
    first_weight = _load(weight_row_ptr, 0, column, NUM_COLUMNS, IS_EVEN, "evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :, None]
    x_row_ptr = layer.x + (row.to(tl.int64) * stride_x_row * UNIT)[None, :, None]
    total = tl.zeros([NUM_PARTS, ROWS, BLOCK_OUTPUT], tl.float32)
    for start in tl.range(STEP, NUM_COLUMNS, STEP, num_stages=NUM_STAGES):
        weight = _load(weight_row_ptr, start, column, NUM_COLUMNS, IS_EVEN, "evict_first")
        x = _load_rows(x_row_ptr, is_row, start, column, NUM_COLUMNS, IS_EVEN)
        total = multiply(x, weight, total)
    # last, as above
    x = _load_rows(x_row_ptr, is_row, 0, column, NUM_COLUMNS, IS_EVEN)
    result = tl.sum(multiply(x, first_weight, total), axis=0)

    is_output = output < num_outputs
    if layer.bias is not None:
        result += tl.load(layer.bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    output_row_ptr = layer.output + (row.to(tl.int64) * stride_output_row)[:, None]
    is_stored = (row < num_rows)[:, None] & is_output[None, :]
    tl.store(output_row_ptr + output[None, :], result.to(layer.output.dtype.element_ty), mask=is_stored)


def launch_few_rows(layer: Layer, prefetch_weight: bool) -> None:
    """Launches one of the kernels above."""
    (num_rows, num_columns), num_outputs = layer.x.shape, layer.weight.shape[0]
    if layer.x.dtype == torch.float32:
        entries = tuning.row(SINGLE_TUNING, layer.x.device)
        tuned = next(entry for entry in entries if num_columns <= entry["most_columns"])
    else:
        tuned = choose_tuning(TUNING, layer)
    num_blocks, num_warps = triton.cdiv(num_outputs, tuned["block_output"]), tuned["num_warps"]
    step = min(tuned["block_column"], next_power_of_2(num_columns))
    arguments = layer_arguments(layer) | {
        "BLOCK_OUTPUT": tuned["block_output"], "NUM_STAGES": tuned["num_stages"], "PREFETCH_WEIGHT": prefetch_weight,
        "num_warps": num_warps,
    }  # fmt: skip
    if tuned["uses_dot"]:
        launch(
            "linear_decode", _linear_decode_rows_kernel, (num_blocks if num_rows else 0,),
            NUM_PARTS=num_warps, BLOCK_COLUMN=max(step // num_warps, 16), **arguments,  # tensor cores take no fewer
        )  # fmt: skip
    else:
        launch(
            "linear_decode", _linear_decode_plain_kernel, (num_blocks * triton.cdiv(num_rows, PLAIN_ROWS),),
            BLOCK_ROW=1 if num_rows == 1 else PLAIN_ROWS, BLOCK_COLUMN=max(step, 16 // layer.x.element_size()),
            **arguments,
        )  # fmt: skip
