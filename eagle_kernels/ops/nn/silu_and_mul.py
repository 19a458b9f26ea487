"""The activation of a SwiGLU block.

Computes: silu(gate) * up, in fp32.
Invariants: An element depends on its own gate and up alone, NaN as well. No program reads what another one overwrites.
Grid: (T, column blocks) for T tokens, one program makes one block of a row.
Launches: 1
Traffic: 3 * element bytes * T * I
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.strides import row_unit
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher

IN_PLACE = {"out": ("gate", "up")}

# block_column: columns of one token that a program computes, 8 a thread.
TUNING = {"default": {"block_column": 1024, "num_warps": 4}}


@triton.jit(do_not_specialize=["stride_gate_token", "stride_up_token", "stride_output_token"])
def _silu_and_mul_kernel(
    gate_ptr, up_ptr, output_ptr, stride_gate_token, stride_up_token, stride_output_token,
    UNIT: tl.constexpr, NUM_COLUMNS: tl.constexpr, IS_ROUNDED: tl.constexpr, BLOCK_COLUMN: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMN + tl.arange(0, BLOCK_COLUMN)
    is_column = column < NUM_COLUMNS
    gate_row_ptr = gate_ptr + token * stride_gate_token * UNIT
    if up_ptr is None:  # packed
        up_row_ptr = gate_row_ptr + NUM_COLUMNS
    else:
        up_row_ptr = up_ptr + token * stride_up_token * UNIT
    gate = tl.load(gate_row_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(up_row_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    activated = gate / (1.0 + tl.exp(-gate))
    if IS_ROUNDED:
        activated = activated.to(dtype).to(tl.float32)
    output_row_ptr = output_ptr + token * stride_output_token * UNIT
    tl.store(output_row_ptr + column, (activated * up).to(dtype), mask=is_column)


def contract(values: dict) -> check.Spec:
    args = check.Arguments("silu_and_mul", values)
    if values["up"] is None:
        gate = args.tensor("gate", ("T", "2 * I"), check.FLOAT, contiguous=1)
        if gate.shape[1] % 2:
            args.fail("gate", "have an even number of columns, gate and up, where up is not given", gate.shape[1])
        return args.spec((gate.shape[0], gate.shape[1] // 2), gate.dtype, contiguous=1)
    gate = args.tensor("gate", ("T", "I"), check.FLOAT, contiguous=1)
    args.tensor("up", ("T", "I"), (gate.dtype,), contiguous=1)
    return args.spec(tuple(gate.shape), gate.dtype, contiguous=1)


@launcher
def silu_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    round_activation: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns silu(gate) * up, of two tensors or of the two halves of one.

    Symbols: T tokens, I elements of a row. silu(g) = g / (1 + exp(-g)).

    Args:
        gate: [T, I] fp16, bf16 or fp32; without `up` [T, 2 * I], the gate's columns first. Rows may be strided.
        up: None or [T, I], dtype of `gate`. Rows may be strided.
        round_activation: rounds silu(gate) before the product, as PyTorch's F.silu(gate) * up does. False: rounds the
            product alone, as fused kernels of SGLang and FlashInfer do.
        out: a tensor to write into. Its rows may be strided. It may be `gate` or `up`, or the first half of a `gate`
            that holds both.

    Returns:
        [T, I], dtype of `gate`.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        SwiGLU, https://arxiv.org/abs/2002.05202.

    Example:
        >>> eagle_kernels.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))  # 0 * 5, and 2 / (1 + 1 / e)
        tensor([[0.0000, 1.4621]])
    """
    out = check.allocate("silu_and_mul", contract(locals()), out)
    unit = row_unit(gate, out) if up is None else row_unit(gate, up, out)
    tuned = dict(tuning.row(TUNING, gate.device))
    block_column = min(tuned.pop("block_column"), next_power_of_2(max(out.shape[1], 1)))
    launch(
        "silu_and_mul", _silu_and_mul_kernel, (out.shape[0], triton.cdiv(out.shape[1], block_column)),
        gate_ptr=gate, up_ptr=up, output_ptr=out, stride_gate_token=gate.stride(0) // unit,
        stride_up_token=0 if up is None else up.stride(0) // unit, stride_output_token=out.stride(0) // unit,
        UNIT=unit, NUM_COLUMNS=out.shape[1], IS_ROUNDED=bool(round_activation), BLOCK_COLUMN=block_column, **tuned,
    )  # fmt: skip
    return out
