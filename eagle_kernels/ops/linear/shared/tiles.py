"""What kernels that make tiles of outputs have in common: which tile a program makes, its part of the columns, loads
and stores, and how outputs are dealt out to programs.

Weights are the left operand of the tensor cores, whose large instructions take 64 of their rows and any number of
tokens. Where there are too few outputs for all SMs, columns are cut into parts, whose sums the op that reads the result
adds up (`rms_norm`): a launch for that alone would cost what the parts save.
"""

import torch

from ....primitives.products import FIRST_COLUMNS
from ....runtime import target
from ....runtime.language import tl, triton

MAX_PARTS = 8
# parts begin at multiples of this; as a constant of kernels, too
_PART_COLUMNS = FIRST_COLUMNS
PART_COLUMNS = tl.constexpr(_PART_COLUMNS)
# the least outputs of a program's tile, by which parts are counted
_FEWEST_OUTPUTS = 64


@triton.jit
def place_of_program(num_rows, num_outputs, outputs_each, BLOCK_ROW: tl.constexpr):
    """Returns a program's block of rows, block of outputs, and part.
    Neighbouring programs read the same weights, which the first one brings into the cache."""
    num_row_blocks, num_blocks = tl.cdiv(num_rows, BLOCK_ROW), tl.cdiv(num_outputs, outputs_each)
    row_block, block = tl.program_id(0) % num_row_blocks, tl.program_id(0) // num_row_blocks
    return row_block, block % num_blocks, block // num_blocks


@triton.jit
def columns_of_part(part, NUM_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Returns the first column of a part, and the one after its last."""
    NUM_SECTIONS: tl.constexpr = (NUM_COLUMNS + PART_COLUMNS - 1) // PART_COLUMNS
    first = part * NUM_SECTIONS // NUM_PARTS * PART_COLUMNS
    stop = tl.minimum((part + 1) * NUM_SECTIONS // NUM_PARTS * PART_COLUMNS, NUM_COLUMNS)
    return first, stop


@triton.jit
def store_tile(layer, total, part, output, is_output, row, is_row, strides):
    """Stores sums [OUTPUT, ROW] with the bias, which is the first part's alone. strides: of parts and of rows."""
    if layer.bias is not None:
        total += tl.load(layer.bias + output, mask=is_output & (part == 0), other=0.0).to(tl.float32)[:, None]
    output_ptrs = layer.output + part.to(tl.int64) * strides[0] + output[:, None]
    output_ptrs += (row.to(tl.int64) * strides[1])[None, :]
    tl.store(output_ptrs, total.to(layer.output.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def most_parts(num_columns: int) -> int:
    """Returns the most parts of this many columns that leave none empty."""
    return min(MAX_PARTS, triton.cdiv(num_columns, _PART_COLUMNS))


def parts_of(num_outputs: int, num_columns: int, device: torch.device) -> int:
    """Returns the parts that give each SM a program."""
    parts = target.num_multiprocessors(device) // triton.cdiv(max(num_outputs, 1), _FEWEST_OUTPUTS)
    return min(max(parts, 1), most_parts(num_columns))


def deal_outputs(num_outputs: int, block_output: int, copies: int, device: torch.device) -> int:
    """Returns the outputs of a program: as even as possible over all SMs, in as few rounds as there must be.
    copies: programs of a block of outputs."""
    copies, programs = max(copies, 1), target.num_multiprocessors(device)
    rounds = triton.cdiv(max(num_outputs, 1) * copies, block_output * programs)
    outputs_each = triton.cdiv(max(num_outputs, 1), max(rounds * programs // copies, 1))
    return min(triton.cdiv(outputs_each, 16) * 16, block_output)
