"""Root mean square norm of rows, with the addition of a residual before it.

Computes: y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight), in fp32; with a residual, of x + residual.
Invariants: A row's bits depend on that row alone. A program reads its row before it writes.
Grid: (T, heads) for T tokens, one program normalizes one row; heads is 1 where x has none.
Launches: 1
Traffic: 2 * element bytes per element of x, with a residual 4 * element bytes; of P parts 4 * P + element bytes, with a
    residual 4 * P + 3 * element bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.strides import row_unit
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `rms_norm` returns."""

    output: torch.Tensor
    residual: torch.Tensor


MAX_HIDDEN = 65536
MAX_PARTS = 8
IN_PLACE = {"output": ("x", "residual"), "residual": ("x", "residual")}

# A row stays in registers: 16 columns a thread, until warps would wait for each other.
TUNING = {"default": {"columns_per_warp": 512, "max_warps": 16}}


@triton.jit(do_not_specialize=["stride_x_part", "stride_x_token", "stride_x_head", "stride_residual_token",
                               "stride_residual_head", "stride_output_token", "stride_output_head", "stride_sum_token",
                               "stride_sum_head"])  # fmt: skip
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out,
    eps, weight_offset, stride_x_part, stride_x_token, stride_x_head, stride_residual_token,
    stride_residual_head, stride_output_token, stride_output_head, stride_sum_token, stride_sum_head,
    UNIT: tl.constexpr, X_UNIT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, NUM_PARTS: tl.constexpr,
    IS_SUM_ROUNDED: tl.constexpr, IS_ROUNDED: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, next_power_of_2(HIDDEN_SIZE))
    is_column = column < HIDDEN_SIZE
    dtype = out.output.dtype.element_ty

    x_row_ptr = x_ptr + (token * stride_x_token + head * stride_x_head) * X_UNIT
    x = tl.load(x_row_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        x += tl.load(x_row_ptr + tl.cast(part, tl.int64) * stride_x_part * X_UNIT + column, mask=is_column, other=0.0)
    if NUM_PARTS > 0:
        x = x.to(dtype).to(tl.float32)
    # loaded before anything waits for the sum
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_row_ptr = residual_ptr + (token * stride_residual_token + head * stride_residual_head) * UNIT
        residual = tl.load(residual_row_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        x += residual
        total = x.to(dtype)
        sum_row_ptr = out.residual + (token * stride_sum_token + head * stride_sum_head) * UNIT
        tl.store(sum_row_ptr + column, total, mask=is_column)
        if IS_SUM_ROUNDED:
            x = total.to(tl.float32)

    mean_square = tl.math.div_rn(tl.sum(x * x), HIDDEN_SIZE * 1.0)
    normalized = x * tl.math.div_rn(1.0, tl.math.sqrt_rn(mean_square + eps))
    if IS_ROUNDED:
        normalized = normalized.to(dtype).to(tl.float32)
    output = normalized * (weight_offset + weight)
    output_row_ptr = out.output + (token * stride_output_token + head * stride_output_head) * UNIT
    tl.store(output_row_ptr + column, output.to(dtype), mask=is_column)


def contract(values: dict) -> Output:
    args = check.Arguments("rms_norm", values)
    x = values["x"]
    axes = ("T", "heads", "H") if isinstance(x, torch.Tensor) and x.dim() == 3 else ("T", "H")
    if values["sums_parts"]:
        axes = ("T", "H")
        x = args.tensor("x", ("P", *axes), (torch.float32,), contiguous=1)
        if not 1 <= args.size("P") <= MAX_PARTS:
            args.fail("x", f"have P in 1..{MAX_PARTS}", args.size("P"))
        dtypes = check.FLOAT
    else:
        x = args.tensor("x", axes, check.FLOAT, contiguous=1)
        dtypes = (x.dtype,)
    if not 1 <= args.size("H") <= MAX_HIDDEN:
        args.fail("x", f"have H in 1..{MAX_HIDDEN}", args.size("H"))
    dtype = args.tensor("weight", ("H",), dtypes).dtype
    residual = args.tensor("residual", axes, (dtype,), contiguous=1, optional=True)
    args.number("eps", 0.0)
    args.number("weight_offset")
    num_tokens = 0 if residual is None else args.size("T")
    return Output(
        args.spec(tuple(x.shape[-len(axes) :]), dtype, contiguous=1),
        args.spec((num_tokens, *x.shape[1 - len(axes) :]), dtype, contiguous=1),
    )


@launcher
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_normalized: bool = True,
    sums_parts: bool = False,
    out: Output | None = None,
) -> Output:
    """Normalizes each row of `x`, or of `x + residual`, by its root mean square.

    Symbols: T tokens, H elements of a row, 1..65536; P = 1..8 parts. A row gives x / sqrt(mean(x^2) + eps) *
    (weight_offset + weight). All axes but the last may be strided.

    Args:
        x: [T, H] or [T, heads, H] fp16, bf16 or fp32; with sums_parts [P, T, H] fp32.
        weight: [H] fp16, bf16 or fp32; dtype of `x`, except with sums_parts.
        residual: None or [T, H] or [T, heads, H], dtype of `weight`. Added to `x` first.
        eps: added to the mean of the squares, at least 0.
        weight_offset: added to the weight; 1 for Gemma.
        round_sum: normalizes x + residual as it is returned, rounded, as Hugging Face's models do. False: in fp32, as
            fused kernels of SGLang and FlashInfer do.
        round_normalized: also rounds before the product with the weight, as Hugging Face's norms of Llama, Qwen and
            Mistral do. False: rounds once, at the end, as those of Gemma and OLMo 2 do.
        sums_parts: `x` is from `linear_decode` with num_parts: its parts are added up first, in order, and the sum is
            rounded.
        out: two tensors to write into. Each may be `x` or `residual`: (x, residual) works in place.

    Returns:
        A named tuple:
        output: [T, H] or [T, heads, H], dtype of `weight`. The normalized rows. A NaN stays in its row.
        residual: [T, H] or [T, heads, H], dtype of `weight`. x + residual, rounded once, for the next layer; without
            `residual` [0, H] or [0, heads, H].

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        RMSNorm, https://arxiv.org/abs/1910.07467, rounded as in Hugging Face's models.

    Example:
        >>> x, residual = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 4.0]])  # the sum's mean square is 25
        >>> eagle_kernels.rms_norm(x, torch.ones(2), residual, eps=0.0)
        Output(output=tensor([[0.2000, 1.4000]]), residual=tensor([[1., 7.]]))
    """
    out = check.allocate("rms_norm", contract(locals()), out)
    num_parts = len(x) if sums_parts else 0
    unit = row_unit(*([out.output] if residual is None else [out.output, residual, out.residual]))
    x_unit = row_unit(x)
    strides = {"stride_x_part": x.stride(0) // x_unit if sums_parts else 0}
    has_heads = out.output.dim() == 3
    for name, tensor in zip(("x", "output", "residual", "sum"), (x, out.output, residual, out.residual)):
        of_token, of_head = (0, 0) if tensor is None else tensor.stride()[sums_parts and name == "x" :][:2]
        of_unit = x_unit if name == "x" else unit
        strides[f"stride_{name}_token"] = of_token // of_unit
        strides[f"stride_{name}_head"] = of_head // of_unit if has_heads else 0
    tuned = tuning.row(TUNING, x.device)
    block_hidden = next_power_of_2(x.shape[-1])
    launch(
        "rms_norm", _rms_norm_kernel, (out.output.shape[0], out.output.shape[1] if has_heads else 1),
        x_ptr=x, residual_ptr=residual, weight_ptr=weight, out=out, eps=float(eps), weight_offset=float(weight_offset),
        UNIT=unit, X_UNIT=x_unit, HIDDEN_SIZE=x.shape[-1], NUM_PARTS=num_parts, IS_ROUNDED=bool(round_normalized),
        IS_SUM_ROUNDED=bool(round_sum) or residual is None,  # one kernel for both where no sum is made
        num_warps=min(max(block_hidden // tuned["columns_per_warp"], 1), tuned["max_warps"]), **strides,
    )  # fmt: skip
    return out
