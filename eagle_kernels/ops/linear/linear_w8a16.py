"""A linear layer of weights of 8 bits: they are read once, as fast as memory gives them, and unpacked in registers.

Computes: y[t, n] = sum over k of x[t, columns[k]] * (q[n, k] - zero[g, n]) * scale[g, n], plus bias[n], where g is the
    group of column k, q is -128 to 127, and zero is 0 where there are no zeros. Products and sums in fp32.
Invariants: Where scales are multiplied with weights, these are rounded to the dtype of x; where with the sums of a
    group, nothing is. Which happens, and how blocks of columns are added up, follows from sizes and the number of rows;
    deterministic: from sizes alone. An output's bits depend on no other row of weight, a row's on no other row of x.
    Sums are made in one order, without atomics. With prefetch_weight, weights are read before the wait of
    primitives/dependent_launch.py, all else after it.
Grid: (blocks of rows * output blocks * parts,), one program makes one block of outputs of a block of rows.
Launches: 1; one more each with columns, and where parts are merged (past 4 rows)
Traffic: N * K, G * N * 2 (4 with zeros), 2 * T * (K + N), and 2 * N more with a bias; with columns 4 * T * K more; with
    parts, 4 bytes * parts * T * N for the output. Blocks of rows read weights out of the cache.
"""

from __future__ import annotations

import torch

from ...primitives.quantised import of_whole_numbers
from ...runtime import check
from ...runtime.launch import launcher
from .shared import contract as rules
from .shared.entries import entries
from .shared.prepare_rows import reorder_columns
from .shared.quantised import Quantised, choose_row, launch_quantised

# weights of 8 bits: see shared/entries.py
TUNING = entries(8)


def contract(values: dict) -> check.Spec:
    args = check.Arguments("linear_w8a16", values)
    rules.check_inputs(args, 8)
    rules.check_groups(args, torch.int8)
    rules.check_columns(args)
    return rules.output_of(args)


@launcher
def linear_w8a16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    group_size: int | None = None,
    num_parts: int | None = None,
    prefetch_weight: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ W.T + bias for weights W of 8 bits, in groups of columns that share a scale.

    Symbols: T rows; K inputs, at least 1; N outputs; S strips of 16 outputs and C blocks of 128 columns, the last ones
    perhaps partly filled; G = C * 128 / group_size groups.

    Args:
        x: [T, K] fp16 or bf16. Rows may be strided.
        weight: [S, C, 16, 32] int32, in the layout of `eagle_kernels.ops.linear.shared.repack`, which makes it out of
            int8 [N, K] and the layouts of GPTQ and compressed-tensors.
        scales: with group_size [ceil(G / 2), N, 2] fp16 or bf16 (fastest as `x`), groups of an output in pairs; else
            [N] fp16, bf16 or fp32.
        zeros: None (0 everywhere) or the values that stand for 0: with group_size [ceil(G / 2), N, 2] int16, else [N]
            int8.
        columns: None, or [K] int32 or int64: the column of `x` that each column of the weights is for (GPTQ's order of
            activations). Takes another launch.
        bias: None or [N], dtype of `x`.
        group_size: 32, 64 or 128 columns that share a scale, or None: whole rows do.
        num_parts: None, or P in 1..8, at most one for each 128 columns: returns sums of P parts of the columns, as
            `linear_decode` does, which `rms_norm(..., sums_parts=True)` adds up.
        prefetch_weight: reads the first weights before the previous kernel of the stream has ended, where the GPU can.
            Faster, but that kernel must not write `weight`.
        deterministic: a row's bits do not depend on the number of rows. May take longer.
        out: a tensor to write into. Its rows may be strided.

    Returns:
        [T, N], dtype of `x`. Products are summed in fp32 and rounded once; weights times scales may be rounded to the
        dtype of `x` before. A NaN stays in its row. With num_parts [P, T, N] fp32, the bias in the first part.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. With EAGLE_KERNELS_DEBUG=1 also where scales are not
            finite.

    Source:
        W = (q - zero) * scale as GPTQ and compressed-tensors define it; the kernels are eagle_kernels' own.

    Example:
        >>> from eagle_kernels.ops.linear.shared.repack import pack_columns
        >>> weight = pack_columns(torch.tensor([[1, 0], [-1, 7]], dtype=torch.int8), 8)
        >>> x, scales = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([1.0, 0.5])
        >>> eagle_kernels.linear_w8a16(x, weight, scales).tolist()
        [[1.0, 6.5]]
    """
    op = "linear_w8a16"
    out = check.allocate(op, contract(locals()), out)
    num_rows, num_columns = x.shape
    tuned = choose_row(TUNING, num_rows, out.shape[-1], x.device, deterministic, num_parts is None)
    if columns is not None and out.numel():
        x = reorder_columns(op, x, columns)
    constants, scales, zeros = of_whole_numbers(8, scales, zeros, group_size)
    layer = Quantised(x, None, weight, scales, zeros, bias, out)
    launch_quantised(op, layer, num_columns, tuned, constants, prefetch_weight)
    return out
