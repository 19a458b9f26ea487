"""A linear layer of weights of 8 bits with an exponent: they are read once, as fast as memory gives them.

Computes: y[t, n] = sum over k of x[t, k] * q[n, k] * scale[n], plus bias[n], or with scale[k / 128, n / 128], for q of
    float8_e4m3fn. activations "16bit": x as it is, and q becomes the dtype of x in registers. "token" and "block": x is
    rounded to float8_e4m3fn too, each row, or each 128 columns of one, over its own scale max|x| / 448; products of 8
    bits are exact, and are summed over 128 columns before any scale, on Hopper's tensor cores with about 14 bits; these
    sums are added up in fp32.
Invariants: Where scales are multiplied with weights, these are rounded to the dtype of x; where with sums, nothing is.
    Which happens, and how blocks of columns are added up, follows from sizes and the number of rows; deterministic:
    from sizes alone. An output's bits depend on no other row of weight, a row's on no other row of x. Sums are made in
    one order, without atomics. With prefetch_weight, weights are read before the wait of
    primitives/dependent_launch.py, all else after it.
Grid: (blocks of rows * output blocks * parts,), one program makes one block of outputs of a block of rows; before it,
    to round x, (T,).
Launches: 1; one more each to round x, and where parts are merged (past 4 rows)
Traffic: N * K, 4 bytes for each scale, 2 * T * (K + N), and 2 * N more with a bias; 2 * T * K more to round x; with
    parts, 4 bytes * parts * T * N for the output. Blocks of rows read weights out of the cache.
"""

from __future__ import annotations

import torch

from ...primitives.fp8 import check_target
from ...runtime import check
from ...runtime.launch import launcher
from .shared import contract as rules
from .shared.entries import entries, rounded_entries
from .shared.prepare_rows import round_rows
from .shared.quantised import Quantised, choose_row, launch_quantised

# x in 16 bit, and x in 8 bits: see shared/entries.py
TUNING = entries(8)
ROUNDED_TUNING = rounded_entries()
_X_SCALES = {"16bit": 0, "token": 1, "block": 2}


def contract(values: dict) -> check.Spec:
    args = check.Arguments("linear_fp8", values)
    num_columns = rules.check_inputs(args, 8)
    scales = values["scales"]
    if isinstance(scales, torch.Tensor) and scales.dim() == 2:
        num_outputs = 16 * args.size("S")
        args.bind("N", num_outputs, "weight")
        scales = args.tensor("scales", (-(-num_columns // 128), -(-num_outputs // 128)), (torch.float32,))
    else:
        scales = args.tensor("scales", ("N",), (torch.float32,))
        rules.check_outputs(args, "scales")
    args.debug("scales", "be finite", scales.isfinite)
    args.choice("activations", tuple(_X_SCALES))
    if values["activations"] != "16bit":
        check_target("linear_fp8", "activations", torch.empty(0, dtype=torch.float8_e4m3fn, device=args.device))
    return rules.output_of(args)


@launcher
def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "16bit",
    num_parts: int | None = None,
    prefetch_weight: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ W.T + bias for weights W of float8_e4m3fn, with a scale for each output or each 128 x 128 of them.

    Symbols: T rows; K inputs, at least 1; N outputs; S strips of 16 outputs, the last one perhaps partly filled; C
    blocks of 128 columns, likewise.

    Args:
        x: [T, K] fp16 or bf16. Rows may be strided.
        weight: [S, C, 16, 32] int32, in the layout of `eagle_kernels.ops.linear.shared.repack`, which makes it out of
            float8_e4m3fn [N, K]. No weight may be NaN.
        scales: [N] fp32, or [C, ceil(N / 128)] fp32 for blocks of 128 x 128; these need N = 16 * S.
        bias: None or [N], dtype of `x`.
        activations: "16bit": `x` is multiplied as it is. "token" or "block": it is rounded to float8_e4m3fn first, each
            row over a scale of its own, or each 128 columns of a row. Takes another launch, and a GPU that has the
            type.
        num_parts: None, or P in 1..8, at most one for each 128 columns: returns sums of P parts of the columns, as
            `linear_decode` does, which `rms_norm(..., sums_parts=True)` adds up.
        prefetch_weight: reads the first weights before the previous kernel of the stream has ended, where the GPU can.
            Faster, but that kernel must not write `weight`.
        deterministic: a row's bits do not depend on the number of rows. May take longer.
        out: a tensor to write into. Its rows may be strided.

    Returns:
        [T, N], dtype of `x`. Products are summed in fp32 and rounded once; weights times scales may be rounded to the
        dtype of `x` before. A NaN stays in its row. With num_parts [P, T, N] fp32, the bias in the first part. Of `x`
        in 8 bits, tensor cores before Blackwell's keep about 14 bits of a sum of 128 columns.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. With EAGLE_KERNELS_DEBUG=1 also where scales are not
            finite.

    Source:
        The block scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3); the kernels are eagle_kernels' own.

    Example:
        >>> from eagle_kernels.ops.linear.shared.repack import pack_columns
        >>> q = torch.tensor([[1.0, 0.0], [-1.0, 3.5]]).to(torch.float8_e4m3fn)
        >>> x, scales = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([1.0, 0.5])
        >>> eagle_kernels.linear_fp8(x, pack_columns(q.view(torch.uint8), 8), scales).tolist()
        [[1.0, 3.0]]
    """
    op = "linear_fp8"
    out = check.allocate(op, contract(locals()), out)
    num_rows, num_columns = x.shape
    is_rounded = activations != "16bit"
    table, can_share = ROUNDED_TUNING if is_rounded else TUNING, num_parts is None and not is_rounded
    tuned = choose_row(table, num_rows, out.shape[-1], x.device, deterministic, can_share)
    is_blocked, x_scales = scales.dim() == 2, None
    if is_rounded and out.numel():
        (x, x_scales), weight = round_rows(op, x, activations == "block"), weight.view(torch.float8_e4m3fn)
    constants = {
        "BITS": 8, "IS_FLOAT": True, "HAS_ZEROS": False, "GROUP": 128 if is_blocked else 0,
        "IS_SCALE_BF16": False, "X_SCALES": _X_SCALES[activations],
    }  # fmt: skip
    layer = Quantised(x, x_scales, weight, scales, None, bias, out)
    launch_quantised(op, layer, num_columns, tuned, constants, prefetch_weight)
    return out
