"""Linear layers of quantised weights, which are streamed as those of linear_decode are, and unpacked in registers.

A program makes a block of outputs of a tile of rows, or a part of the columns of it (`tiles.py`). For few rows and few
outputs every warp has columns of its own in place of outputs of its own (`_quantised_columns_kernel`), which keeps all
warps busy; their sums are added up last.

A scale is multiplied with the sums of its group's columns (late) or with weights, which are then rounded (early).
Scales and zero points of two groups of an output lie in a word, and are streamed as weights are. Sums are made block by
block in one order, the first block of a part last, whatever the number of rows.
"""

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import load_tile
from ....primitives.quantised import Format, add_block, load_numbers, of_device
from ....primitives.strides import row_unit
from ....runtime import target, tuning
from ....runtime.language import LEAST_DOT_ROWS, next_power_of_2, tl, triton
from ....runtime.launch import launch
from .merge_parts import merge_parts
from .tiles import columns_of_part, deal_outputs, most_parts, place_of_program, store_tile

_SIZES = ["num_rows", "num_outputs", "outputs_each", "stride_x_row", "stride_numbers", "stride_output_row",
          "stride_output_part"]  # fmt: skip


class Quantised(NamedTuple):
    """Pointers to what a layer reads and writes; see `linear_w4a16`."""

    x: Any
    x_scales: Any  # None: x is in 16 bit
    weight: Any
    scales: Any
    zeros: Any
    bias: Any
    output: Any


@triton.jit
def _wrapped(index, stop):
    """Returns index below stop, 0 for stop and more."""
    return tl.where(index < stop, index, 0)


@triton.jit
def _load_x_scale(layer, row, is_row, block, NUM_BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the scales of rows of x for a block of columns, where it has them."""
    if FORMAT.X_SCALES == 2:
        return tl.load(layer.x_scales + row.to(tl.int64) * NUM_BLOCKS + block, mask=is_row, other=0.0)
    else:
        return 1.0


@triton.jit(do_not_specialize=_SIZES)
def _quantised_tiles_kernel(
    layer, num_rows, num_outputs, outputs_each, stride_x_row, stride_numbers, stride_output_row, stride_output_part,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_OUTPUT: tl.constexpr, BLOCKS: tl.constexpr, NUM_STAGES: tl.constexpr,
    PREFETCH_WEIGHT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_ROW rows by outputs_each rows of weight, in one part of the columns, BLOCKS blocks in a turn.
    PREFETCH_WEIGHT: the first block of weights is asked for before x is there, and kept for last."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    row_block, block, part = place_of_program(num_rows, num_outputs, outputs_each, BLOCK_ROW)
    first, stop = columns_of_part(part, NUM_COLUMNS, NUM_PARTS)
    first_block, num_blocks = first // 128, tl.cdiv(stop - first, 128)
    lane = tl.arange(0, BLOCK_OUTPUT)
    output = block * outputs_each + lane
    is_output = (lane < outputs_each) & (output < num_outputs)
    # words of an output in a block; where x has 8 bits, bytes
    WORDS: tl.constexpr = 128 if FORMAT.X_SCALES > 0 else 4 * FORMAT.BITS
    NUM_BLOCKS: tl.constexpr = (NUM_COLUMNS + 128 - 1) // 128
    strip = (output // 16).to(tl.int64) * (NUM_BLOCKS * 16 * WORDS)
    words_ptrs = layer.weight + strip + output % 16 * WORDS
    word = tl.arange(0, WORDS)
    if PREFETCH_WEIGHT:
        first_word = first_block * (16 * WORDS) + word
        first_words = load_tile(words_ptrs, is_output, first_word, NUM_COLUMNS, True, "evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    row = row_block * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    is_row = row < num_rows
    lane_column = tl.arange(0, 128)
    IS_EVEN: tl.constexpr = NUM_COLUMNS % 128 == 0 or FORMAT.X_SCALES > 0
    x_row_ptrs = layer.x + row.to(tl.int64) * stride_x_row * UNIT
    if PREFETCH_WEIGHT:
        first_x = load_tile(x_row_ptrs, is_row, first + lane_column, NUM_COLUMNS, IS_EVEN, "evict_last")
    known = tl.minimum(output, num_outputs - 1)  # which has scales
    total = tl.zeros([BLOCK_OUTPUT, BLOCK_ROW], tl.float32)
    for index in tl.range(0, num_blocks - PREFETCH_WEIGHT, BLOCKS, num_stages=NUM_STAGES):
        for place in tl.static_range(BLOCKS):
            is_read, is_row_read = is_output, is_row
            if BLOCKS > 1:  # the last turn may have fewer
                is_read &= index + place < num_blocks - PREFETCH_WEIGHT
                is_row_read &= index + place < num_blocks - PREFETCH_WEIGHT
            here = first_block + _wrapped(index + place + 1, num_blocks)
            words = load_tile(words_ptrs, is_read, here * (16 * WORDS) + word, NUM_COLUMNS, True, "evict_first")
            x = load_tile(x_row_ptrs, is_row_read, here * 128 + lane_column, NUM_COLUMNS, IS_EVEN, "evict_last")
            x_scale = _load_x_scale(layer, row, is_row_read, here, NUM_BLOCKS, FORMAT)
            numbers = load_numbers(layer, here, known, stride_numbers, FORMAT)
            total = add_block(total, words, x, x_scale, numbers, FORMAT, False)
    if PREFETCH_WEIGHT:
        x_scale = _load_x_scale(layer, row, is_row, first_block, NUM_BLOCKS, FORMAT)
        numbers = load_numbers(layer, first_block, known, stride_numbers, FORMAT)
        total = add_block(total, first_words, first_x, x_scale, numbers, FORMAT, False)

    if FORMAT.GROUP == 0:
        total *= tl.load(layer.scales + known).to(tl.float32)[:, None]
    if FORMAT.X_SCALES == 1:
        total *= tl.load(layer.x_scales + row, mask=is_row, other=0.0)[None, :]
    store_tile(layer, total, part, output, is_output, row, is_row, (stride_output_part, stride_output_row))


@triton.jit(do_not_specialize=_SIZES)
def _quantised_columns_kernel(
    layer, num_rows, num_outputs, outputs_each, stride_x_row, stride_numbers, stride_output_row, stride_output_part,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_SHARES: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_OUTPUT: tl.constexpr, ROWS_LEFT: tl.constexpr, NUM_STAGES: tl.constexpr,
    PREFETCH_WEIGHT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_ROW rows by BLOCK_OUTPUT rows of weight; each of NUM_SHARES warps has blocks of its own."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    row_block, block, part = place_of_program(num_rows, num_outputs, outputs_each, BLOCK_ROW)
    output = block * outputs_each + tl.arange(0, BLOCK_OUTPUT)
    # past the end the last row again: cheaper than a mask on every load
    known = tl.minimum(output, num_outputs - 1)
    WORDS: tl.constexpr = 4 * FORMAT.BITS
    NUM_BLOCKS: tl.constexpr = (NUM_COLUMNS + 128 - 1) // 128
    IS_EVEN: tl.constexpr = NUM_BLOCKS % NUM_SHARES == 0
    share = tl.arange(0, NUM_SHARES)
    strip = (known // 16).to(tl.int64) * (NUM_BLOCKS * 16 * WORDS) + known % 16 * WORDS
    lane = share[:, None, None] * (16 * WORDS) + tl.arange(0, WORDS)[None, None, :]
    words_ptrs = layer.weight + strip[None, :, None] + lane
    is_first = (share < NUM_BLOCKS)[:, None, None]
    first_words = tl.load(words_ptrs, mask=is_first, other=0, eviction_policy="evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    row = row_block * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    is_row = row < num_rows
    column = share[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    x_ptrs = layer.x + (row.to(tl.int64) * stride_x_row * UNIT)[None, :, None] + column
    if ROWS_LEFT:
        total = tl.zeros([NUM_SHARES, BLOCK_ROW, BLOCK_OUTPUT], tl.float32)
    else:
        total = tl.zeros([NUM_SHARES, BLOCK_OUTPUT, BLOCK_ROW], tl.float32)
    for begin in tl.range(NUM_SHARES, NUM_BLOCKS, NUM_SHARES, num_stages=NUM_STAGES):
        if IS_EVEN:
            words = tl.load(words_ptrs + begin * (16 * WORDS), eviction_policy="evict_first")
        else:
            is_block = (begin + share < NUM_BLOCKS)[:, None, None]
            words = tl.load(words_ptrs + begin * (16 * WORDS), mask=is_block, other=0, eviction_policy="evict_first")
        is_read = is_row[None, :, None] & (begin * 128 + column < NUM_COLUMNS)
        x = tl.load(x_ptrs + begin * 128, mask=is_read, other=0.0, eviction_policy="evict_last")
        blocks = tl.minimum(begin + share, NUM_BLOCKS - 1)[:, None]
        numbers = load_numbers(layer, blocks, known[None, :], stride_numbers, FORMAT)
        total = add_block(total, words, x, 1.0, numbers, FORMAT, ROWS_LEFT)
    # last, so that the loop has started to load its tiles before anything waits for x
    is_read = is_row[None, :, None] & (column < NUM_COLUMNS)
    x = tl.load(x_ptrs, mask=is_read, other=0.0, eviction_policy="evict_last")
    first_blocks = tl.minimum(share, NUM_BLOCKS - 1)[:, None]
    numbers = load_numbers(layer, first_blocks, known[None, :], stride_numbers, FORMAT)
    total = tl.sum(add_block(total, first_words, x, 1.0, numbers, FORMAT, ROWS_LEFT), axis=0)
    if ROWS_LEFT:
        total = tl.trans(total)

    if FORMAT.GROUP == 0:
        total *= tl.load(layer.scales + known).to(tl.float32)[:, None]
    is_output = output < num_outputs
    store_tile(layer, total, part, output, is_output, row, is_row, (stride_output_part, stride_output_row))


def choose_row(
    table: dict, num_rows: int, num_outputs: int, device: torch.device, deterministic: bool, can_share: bool
) -> dict:
    """Returns the first entry of the device's row that fits the sizes; the last one fits all.
    deterministic: one whose sums are made like those of all other numbers of rows. can_share: warps may have columns of
    their own."""
    for entry in tuning.row(table, device):
        is_alike = entry["column_warps"] == 1 and not entry["late"] and entry["block_row"] >= 16
        is_allowed = is_alike or not deterministic and (can_share or entry["column_warps"] == 1)
        if num_rows <= entry["max_rows"] and num_outputs >= entry["least_outputs"] and is_allowed:
            return entry | {"merged": 0} if deterministic else entry
    raise AssertionError("the last entry of a table fits all sizes, also where rows are alike")


def launch_quantised(
    op: str, layer: Quantised, num_columns: int, tuned: dict, constants: dict, prefetch_weight: bool
) -> None:
    """Launches a kernel above into an output [T, N], or [parts, T, N] fp32. constants: entries of `Format`."""
    out, (num_rows, num_outputs) = layer.output, layer.output.shape[-2:]
    shares, block_row = tuned["column_warps"], max(tuned["block_row"], LEAST_DOT_ROWS)
    num_parts, num_row_blocks = 1 if out.dim() == 2 else len(out), triton.cdiv(num_rows, block_row)
    block_output = outputs_each = tuned["block_output"]
    merged = None
    if tuned["merged"] and out.dim() == 2 and out.numel():
        programs = tuned["merged"] * target.num_multiprocessors(out.device)
        programs //= triton.cdiv(num_outputs, block_output) * num_row_blocks
        # powers of two: a kernel is compiled for each number
        num_parts = next_power_of_2(max(1, min(programs, most_parts(num_columns))) + 1) // 2
        if num_parts > 1:
            merged, out = out, torch.empty((num_parts, *out.shape), dtype=torch.float32, device=out.device)
            layer = layer._replace(output=out)
    if shares == 1:
        outputs_each = deal_outputs(num_outputs, block_output, num_parts * num_row_blocks, out.device)
    # sums of products of 8 bits have the scales; of a part of a block there are none
    is_early = 0 < constants["GROUP"] < 128 or constants["GROUP"] == 128 and not tuned["late"]
    made = Format(IS_EARLY=is_early and not constants["X_SCALES"], **of_device(out.device), **constants)
    unit = row_unit(layer.x)
    arguments = {
        "layer": layer, "num_rows": num_rows, "num_outputs": num_outputs, "outputs_each": outputs_each,
        "stride_numbers": layer.scales.stride(0) if layer.scales.dim() == 2 else 0,
        "stride_x_row": layer.x.stride(0) // unit, "stride_output_row": out.stride(-2),
        "stride_output_part": out.stride(0) if out.dim() == 3 else 0, "UNIT": unit, "NUM_COLUMNS": num_columns,
        "FORMAT": made,
        "BLOCK_ROW": block_row, "BLOCK_OUTPUT": block_output, "NUM_STAGES": tuned["num_stages"],
        "PREFETCH_WEIGHT": bool(prefetch_weight and tuned["prefetched"]),
    }  # fmt: skip
    # `num_stages` of Triton are of loops that name none; ours do
    arguments |= {name: each for name, each in tuning.compiler_options(tuned).items() if name != "num_stages"}
    grid = (triton.cdiv(num_outputs, outputs_each) * num_parts * num_row_blocks,)
    if shares == 1:
        launch(op, _quantised_tiles_kernel, grid, NUM_PARTS=num_parts, BLOCKS=tuned["blocks"], **arguments)
    else:
        launch(op, _quantised_columns_kernel, grid, NUM_SHARES=shares, ROWS_LEFT=bool(tuned["rows_left"]), **arguments)
    if merged is not None:
        merge_parts(op, out, merged)
