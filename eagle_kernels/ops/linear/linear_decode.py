"""A linear layer for the tokens of a decoding step: the weights are read once, as fast as memory gives them.

Computes: x @ weight.T + bias, with products and sums in fp32 (no TF32).
Invariants: In fp16 and bf16 one row, 2 to 16 rows, and more are summed in orders of their own, so their last bits may
    differ; deterministic: all are summed the way large batches are. An output's bits depend on no other row of weight.
    Sums are made in one order, without atomics. With prefetch_weight, weights are read before the wait of
    primitives/dependent_launch.py, x and bias after it.
Grid: (output blocks,), one program makes one block of outputs of all rows, and reads its rows of weight from end to
    end; in fp32 (output blocks * blocks of 4 rows,); past 16 rows, and where it is faster, (output blocks * blocks of
    rows * parts,).
Launches: 1
Traffic: element bytes * (N * K + T * (K + N)), and N more with a bias; with parts, 4 bytes * parts * T * N for the
    output. Blocks of rows read the weights out of the cache.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared import few_rows, many_rows, tiles
from .shared.layer import Layer

MAX_ROWS = many_rows.MAX_ROWS
MAX_SINGLE_ROWS = few_rows.MAX_SINGLE_ROWS
# In fp32, past 16 rows the weights are read from the cache several times. On an H100, more products than this take
# longer than in cuBLAS, whose calls with few rows take 6 us and more.
MAX_SINGLE_PRODUCTS = 2**25
# outputs from which one program an SM is kept busy without parts
_UNSPLIT_OUTPUTS = 5120


def contract(values: dict) -> check.Spec:
    args = check.Arguments("linear_decode", values)
    x = args.tensor("x", ("T", "K"), check.FLOAT, contiguous=1)
    if args.size("T") > max_rows(x.dtype):
        args.fail("x", f"have T in 0..{max_rows(x.dtype)}", args.size("T"))
    if args.size("K") < 1:
        args.fail("x", "have K of at least 1", args.size("K"))
    args.tensor("weight", ("N", "K"), (x.dtype,), contiguous=1)
    args.tensor("bias", ("N",), (x.dtype,), optional=True)
    num_parts = values["num_parts"]
    if num_parts is None:
        return args.spec((args.size("T"), args.size("N")), x.dtype, contiguous=1)
    if x.dtype == torch.float32:
        args.fail("num_parts", "be None in fp32", num_parts)
    num_parts = args.integer("num_parts", 1, tiles.most_parts(args.size("K")))
    return args.spec((num_parts, args.size("T"), args.size("N")), torch.float32, contiguous=1)


def is_for(num_rows: int, weight: torch.Tensor) -> bool:
    """Returns whether `linear_decode` takes this many rows and, for more than 16, is faster than cuBLAS."""
    if weight.dtype == torch.float32:
        is_fast = num_rows <= 16 or num_rows * weight.numel() <= MAX_SINGLE_PRODUCTS
        return is_fast and num_rows <= MAX_SINGLE_ROWS
    is_fast = weight.shape[0] >= _UNSPLIT_OUTPUTS and many_rows.is_fast(num_rows, weight.device)
    return num_rows <= few_rows.MAX_ROWS or is_fast


def parts_for(num_rows: int, weight: torch.Tensor, deterministic: bool = False) -> int | None:
    """Returns the num_parts with which `linear_decode` is faster than cuBLAS, if there are any, else None.
    This is where a weight has too few rows for all SMs; the op that reads the result must take parts. deterministic:
    the parts are the same for any number of rows, as cuBLAS is no choice."""
    if weight.dtype == torch.float32 or weight.shape[0] >= _UNSPLIT_OUTPUTS:
        return None
    is_best = num_rows > few_rows.MAX_ROWS and many_rows.is_fast(num_rows, weight.device)
    parts = tiles.parts_of(*weight.shape, weight.device)
    return parts if parts > 1 and (is_best or deterministic) else None


def max_rows(dtype: torch.dtype) -> int:
    """Returns the most rows that the op takes."""
    return MAX_SINGLE_ROWS if dtype == torch.float32 else MAX_ROWS


@launcher
def linear_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int | None = None,
    prefetch_weight: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias for the tokens of a decoding step.

    Symbols: T tokens, 0..256, in fp32 0..64; K inputs, at least 1; N outputs.

    Args:
        x: [T, K] fp16, bf16 or fp32. Rows may be strided.
        weight: [N, K], dtype of `x`. Rows may be strided.
        bias: None or [N], dtype of `x`.
        num_parts: None, or P in 1..8, at most one for each 128 columns, not in fp32: returns sums of P parts of the
            columns, which `rms_norm(..., sums_parts=True)` adds up. Faster where N is small and T large:
            `eagle_kernels.ops.linear.linear_decode.parts_for` says when.
        prefetch_weight: reads the first weights before the previous kernel of the stream has ended, where the GPU can.
            Faster, but that kernel must not write `weight`.
        deterministic: a row's bits do not depend on the number of rows (always true in fp32). May take longer for up to
            16 rows.
        out: a tensor to write into. Its rows may be strided.

    Returns:
        [T, N], dtype of `x`. Products are summed in fp32 and rounded once. A NaN stays in its row.
        With num_parts [P, T, N] fp32: sums of parts of the columns, in order, the bias in the first one. Parts begin at
        multiples of 128 columns and are as even as these allow.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        PyTorch's torch.nn.functional.linear; the kernels are eagle_kernels' own.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> eagle_kernels.linear_decode(x, weight, torch.tensor([0.0, 10.0])).tolist()
        [[1.0, 13.0]]
    """
    out = check.allocate("linear_decode", contract(locals()), out)
    layer = Layer(x, weight, bias, out)
    is_few = len(x) <= few_rows.MAX_ROWS and not many_rows.is_best(len(x), weight)
    if x.dtype == torch.float32 or is_few and num_parts is None and not deterministic:
        few_rows.launch_few_rows(layer, prefetch_weight)
    else:
        many_rows.launch_many_rows(layer, prefetch_weight)
    return out
