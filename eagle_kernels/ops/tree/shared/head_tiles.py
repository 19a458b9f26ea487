"""The logits of a head, a tile of the vocabulary a program, of which only the best ones reach memory.

Logits are summed as `linear_decode(..., deterministic=True)` does, column by column in one order, the first columns
last, and rounded to the dtype of the hidden rows.
"""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.products import load_tile, stream_weight
from ....primitives.strides import row_unit
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .selection import Tiles, store_best

MAX_ROWS = 64

# The first entry that allows the number of rows is taken. All must have the same block_output: the bits of a sum depend
# on where it is cut. prefetched: the first tile of weights is kept in registers.
_TILE = {"max_rows": MAX_ROWS, "block_output": 128, "block_column": 64, "prefetched": False, "num_warps": 8,
         "num_stages": 3}  # fmt: skip
_HOPPER = _TILE | {"block_column": 128, "num_stages": 4}
# as linear_decode's for as many outputs: bench/results/NVIDIA_H200/tuning/linear_decode.txt
TUNING = {
    "default": (_TILE,),
    # 64 KiB of shared memory
    "gfx942": (_TILE | {"num_stages": 2},),
    "sm_90": (_HOPPER | {"max_rows": 16}, _HOPPER | {"max_rows": 32}, _HOPPER),
}


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "num_tiles", "stride_hidden_row", "stride_weight_token"])
def _select_from_head_tiles_kernel(
    hidden_ptr, weight_ptr, tiles, num_rows, vocab_size, num_tiles, stride_hidden_row, stride_weight_token,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, TOPK: tl.constexpr, BLOCK_ROW: tl.constexpr,
    BLOCK_OUTPUT: tl.constexpr, BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_WEIGHT: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies all rows by BLOCK_OUTPUT rows of weight.
    PREFETCH_WEIGHT: the first tile of weights is asked for before hidden rows are there, and kept for last."""
    await_predecessor(ENABLE_PDL and not PREFETCH_WEIGHT)
    tile = tl.program_id(0)
    token = tile * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_token = token < vocab_size
    columns = tl.arange(0, BLOCK_COLUMN)
    weight_row_ptrs = weight_ptr + token.to(tl.int64) * stride_weight_token * UNIT
    first_weight = None
    if PREFETCH_WEIGHT:
        IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
        first_weight = load_tile(weight_row_ptrs, is_token, columns, NUM_COLUMNS, IS_EVEN, "evict_first")
    await_predecessor(ENABLE_PDL and PREFETCH_WEIGHT)

    row = tl.arange(0, BLOCK_ROW).to(tl.int64)
    is_row = row < num_rows
    hidden_row_ptrs = hidden_ptr + row * stride_hidden_row * UNIT
    logits = stream_weight(
        weight_row_ptrs, is_token, hidden_row_ptrs, is_row, columns, tl.cdiv(NUM_COLUMNS, BLOCK_COLUMN), first_weight,
        NUM_COLUMNS=NUM_COLUMNS, BLOCK_COLUMN=BLOCK_COLUMN, NUM_STAGES=NUM_STAGES,
    )  # fmt: skip
    # + 0.0: where sums become fp16 at once, ptxas lets each product of the loop wait for the one before
    logits = (logits + 0.0).to(hidden_ptr.dtype.element_ty)
    store_best(logits, is_token, tile, num_tiles, row, is_row, tiles, COUNT=TOPK)


def tile_size(device: torch.device) -> int:
    """Returns the tokens of a tile."""
    return tuning.row(TUNING, device)[0]["block_output"]


def scan_head(op: str, hidden: torch.Tensor, weight: torch.Tensor, topk: int, prefetch_weight: bool) -> Tiles:
    """Launches the kernel above, which reads the whole head, and returns its results."""
    device, (num_rows, num_columns), vocab_size = hidden.device, hidden.shape, weight.shape[0]
    tuned = next(entry for entry in tuning.row(TUNING, device) if num_rows <= entry["max_rows"])
    num_tiles, unit = triton.cdiv(vocab_size, tuned["block_output"]), row_unit(hidden, weight)
    tiles = Tiles(
        torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_tiles, topk), dtype=torch.int32, device=device),
    )
    launch(
        op, _select_from_head_tiles_kernel, (num_tiles if num_rows else 0,),
        hidden_ptr=hidden, weight_ptr=weight, tiles=tiles, num_rows=num_rows, vocab_size=vocab_size,
        num_tiles=num_tiles, stride_hidden_row=hidden.stride(0) // unit, stride_weight_token=weight.stride(0) // unit,
        UNIT=unit, NUM_COLUMNS=num_columns, TOPK=topk, BLOCK_ROW=tuned["max_rows"], BLOCK_OUTPUT=tuned["block_output"],
        BLOCK_COLUMN=tuned["block_column"], NUM_STAGES=tuned["num_stages"],
        PREFETCH_WEIGHT=bool(prefetch_weight and tuned["prefetched"]), num_warps=tuned["num_warps"],
    )  # fmt: skip
    return tiles
