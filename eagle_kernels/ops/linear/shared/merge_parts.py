"""Sums of parts of the columns become a layer's output, in a launch after.

Where few programs would make all outputs of many rows, larger tiles and parts read x less often, which outweighs this.
"""

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime.language import tl, triton
from ....runtime.launch import launch

# outputs that a program merges
_BLOCK_OUTPUT = 1024


@triton.jit(do_not_specialize=["num_outputs", "stride_part", "stride_output_row"])
def _merge_parts_kernel(
    parts_ptr, output_ptr, num_outputs, stride_part, stride_output_row, NUM_PARTS: tl.constexpr,
    BLOCK_OUTPUT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    row, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_OUTPUT + tl.arange(0, BLOCK_OUTPUT)
    is_output = output < num_outputs
    part_ptrs = parts_ptr + row * num_outputs + output
    total = tl.load(part_ptrs, mask=is_output, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(part_ptrs + tl.cast(part, tl.int64) * stride_part, mask=is_output, other=0.0)
    output_ptrs = output_ptr + row * stride_output_row + output
    tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=is_output)


def merge_parts(op: str, parts: torch.Tensor, output: torch.Tensor) -> None:
    """Adds up parts [P, T, N] fp32, in order, into an output [T, N]."""
    num_parts, num_rows, num_outputs = parts.shape
    launch(
        op, _merge_parts_kernel, (num_rows, triton.cdiv(num_outputs, _BLOCK_OUTPUT)),
        parts_ptr=parts, output_ptr=output, num_outputs=num_outputs, stride_part=parts.stride(0),
        stride_output_row=output.stride(0), NUM_PARTS=num_parts, BLOCK_OUTPUT=_BLOCK_OUTPUT, num_warps=4,
    )  # fmt: skip
