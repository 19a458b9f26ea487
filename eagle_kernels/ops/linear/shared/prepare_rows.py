"""Rows of x as quantised weights need them, in a launch before: columns in the order of the weights, or in 8 bits.

In 8 bits, bytes lie as those of weights of 8 bits do: bytes 8 * w to 8 * w + 7 of a block of 128 columns are columns
2 * w + (0, 32, 1, 33, 64, 96, 65, 97).
"""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.fp8 import encode_e4m3
from ....primitives.strides import row_unit
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

# columns that a program reorders
_BLOCK_REORDERED = 1024
# columns that a program rounds at once
_BLOCK_ROUNDED = 2048
_LARGEST, _LEAST = tl.constexpr(448.0), tl.constexpr(1e-10)


@triton.jit(do_not_specialize=["num_columns", "stride_x_row"])
def _reorder_columns_kernel(
    x_ptr, columns_ptr, output_ptr, num_columns, stride_x_row, UNIT: tl.constexpr, BLOCK_COLUMN: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
    is_column = column < num_columns
    source = tl.load(columns_ptr + column, mask=is_column, other=0).to(tl.int64)
    # in bounds, whatever the order holds
    source = tl.minimum(tl.maximum(source, 0), num_columns - 1)
    values = tl.load(x_ptr + row * stride_x_row * UNIT + source, mask=is_column, other=0.0)
    tl.store(output_ptr + row * num_columns + column, values, mask=is_column)


@triton.jit
def _load_blocks(x_row_ptr, block, column, NUM_COLUMNS: tl.constexpr):
    """Loads blocks [BLOCK, 128] of a row, 0 past its end."""
    columns = block[:, None] * 128 + column[None, :]
    return tl.load(x_row_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["stride_x_row"])
def _round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, stride_x_row, UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, BY_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Rounds a row to 8 bits, with a scale of its own or one for each 128 columns."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * stride_x_row * UNIT
    place = tl.arange(0, 128)
    column = place // 8 * 2 + place // 4 % 2 * 64 + place // 2 % 2 + place % 2 * 32
    NUM_BLOCKS: tl.constexpr = (NUM_COLUMNS + 127) // 128
    lane = tl.arange(0, BLOCKS)
    scale = 1.0
    if not BY_BLOCK:
        largest = tl.zeros([BLOCKS, 128], tl.float32)
        for begin in tl.range(0, NUM_BLOCKS, BLOCKS):
            x = tl.abs(_load_blocks(x_row_ptr, begin + lane, column, NUM_COLUMNS))
            largest = tl.where(x > largest, x, tl.where(x != x, x, largest))
        is_number = tl.sum((largest != largest).to(tl.int32)) == 0
        scale = tl.math.div_rn(tl.maximum(tl.max(largest), _LEAST), _LARGEST)
        scale = tl.where(is_number, scale, float("nan"))
        tl.store(scales_ptr + row, scale)
    for begin in tl.range(0, NUM_BLOCKS, BLOCKS):
        block = begin + lane
        x = _load_blocks(x_row_ptr, block, column, NUM_COLUMNS)
        if BY_BLOCK:
            scales = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST), _LARGEST)
            is_number = tl.sum((x != x).to(tl.int32), axis=1) == 0
            scales = tl.where(is_number, scales, float("nan"))
            tl.store(scales_ptr + row * NUM_BLOCKS + block, scales, mask=block < NUM_BLOCKS)
            quotient = tl.math.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
        else:
            quotient = tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
        codes_ptrs = codes_ptr + (row * NUM_BLOCKS + block)[:, None] * 128 + place[None, :]
        codes = encode_e4m3(quotient, 7).to(codes_ptr.dtype.element_ty, bitcast=True)
        tl.store(codes_ptrs, codes, mask=(block < NUM_BLOCKS)[:, None])


def reorder_columns(op: str, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns x [T, K] with its columns in this order."""
    num_rows, num_columns = x.shape
    output, unit = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device), row_unit(x)
    launch(
        op, _reorder_columns_kernel, (num_rows, triton.cdiv(num_columns, _BLOCK_REORDERED)),
        x_ptr=x, columns_ptr=columns, output_ptr=output, num_columns=num_columns, stride_x_row=x.stride(0) // unit,
        UNIT=unit, BLOCK_COLUMN=_BLOCK_REORDERED, num_warps=4,
    )  # fmt: skip
    return output


def round_rows(op: str, x: torch.Tensor, by_block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes float8_e4m3fn [T, blocks * 128], and scales fp32 [T], or [T, blocks] of 128 columns."""
    num_rows, num_columns = x.shape
    num_blocks, unit = triton.cdiv(num_columns, 128), row_unit(x)
    codes = torch.empty((num_rows, num_blocks * 128), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, num_blocks) if by_block else (num_rows,), dtype=torch.float32, device=x.device)
    launch(
        op, _round_rows_kernel, (num_rows,),
        x_ptr=x, codes_ptr=codes, scales_ptr=scales, stride_x_row=x.stride(0) // unit, UNIT=unit,
        NUM_COLUMNS=num_columns, BY_BLOCK=by_block, BLOCKS=min(_BLOCK_ROUNDED // 128, next_power_of_2(num_blocks)),
        num_warps=8,
    )  # fmt: skip
    return codes, scales
