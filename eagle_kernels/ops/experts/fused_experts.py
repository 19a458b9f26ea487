"""What the chosen experts compute: two products around an activation, summed by the router's weights.

Computes: out[t] = sum over k of weights[t, k] * (down[e] @ act(gate_up[e] @ x[t] + b) + c), e = experts[t, k], with the
    biases b and c of the expert, and act(gate, up) = silu(gate) * up, or for "swigluoai" with gate at most limit and up
    within -limit..limit: gate * sigmoid(alpha * gate) * (up + 1). Products and sums in fp32 (no TF32); the activation
    is rounded to the dtype of x.
Invariants: A row's bits depend neither on other rows nor on their number: sums are made column by column, then expert
    by expert in the order of the table, without atomics. Weights of experts that no row goes to are not read.
    The table and weights of the second product are read before the wait of primitives/dependent_launch.py: the
    launch of the first one, directly before, writes neither.
Grid: (blocks of pairs * output blocks,) for either product, one program multiplies the rows of a block, which are of
    one expert (shared/blocks.py), by a block of outputs; then (T, blocks of columns) to sum up.
Launches: 3; one more to sort more than 512 pairs
Traffic: for E' experts that are touched, bytes of a weight * E' * 3 * H * I, and their scales; element bytes * T *
    (2 * H + 2 * K * I) and 8 * T * K * H for what lies between the launches.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.blocks import make_table, num_blocks
from .shared.down import launch_down
from .shared.gate_up import launch_gate_up
from .shared.layer import Product, Shape
from .shared.weights import check_weights, format_of

MAX_EXPERTS, MAX_CHOSEN = 520, 24
ACTIVATIONS = ("silu", "swigluoai")
# The first entry is taken for weights of this kind (words: quantised ones) that allows the number of pairs, and the
# pairs an expert has on average, were they dealt out evenly over the experts that can be touched. down_: of the second
# product. None of these was measured yet. late: scales of 128 columns are multiplied with sums; a row's bits follow
# from it, so it is the same in all entries for words, which take fewer bytes of shared memory than weights, but
# registers to unpack. On Hopper fewer than 64 rows of weight (gates and up together) would be multiplied by another
# instruction, with other bits.
_FEW = {"words": 0, "most_of_all": 2**31, "most_pairs": 4, "block_pair": 16, "late": 0, "block_output": 32,
        "block_column": 128, "num_warps": 4, "num_stages": 4, "down_block_output": 64, "down_block_column": 128,
        "down_num_warps": 4, "down_num_stages": 4}  # fmt: skip
_SOME = _FEW | {"most_pairs": 24, "block_pair": 32, "block_output": 64, "num_stages": 3, "down_num_stages": 3}
_MANY = _SOME | {"most_pairs": 2**31, "block_pair": 128, "block_column": 64, "num_warps": 8, "num_stages": 3,
                 "down_block_output": 128, "down_block_column": 64, "down_num_warps": 8,
                 "down_num_stages": 3}  # fmt: skip
_WORDS = _FEW | {"words": 1}
_WORDS_MANY = _WORDS | {"most_pairs": 2**31, "block_pair": 64, "num_warps": 8, "num_stages": 3, "block_output": 64,
                        "down_block_output": 128, "down_num_warps": 8, "down_num_stages": 3}  # fmt: skip
# twice the weights for each step that is none of unpacking; with fewer pairs there would be too few programs
_WORDS_WIDE = _WORDS | {"late": 1, "block_output": 64, "down_block_output": 128, "num_stages": 6, "down_num_stages": 6}
_TWO = {"num_stages": 2, "down_num_stages": 2}
_THREE = {"num_stages": 3, "down_num_stages": 3}
_NARROW = {"block_column": 64, "down_block_column": 64} | _TWO
TUNING = {
    "default": (
        _FEW | _THREE, _SOME | {"block_column": 64, "down_block_column": 64}, _MANY, _WORDS | _THREE, _WORDS_MANY,
    ),
    # 64 KiB of shared memory
    "gfx942": (
        _FEW | _NARROW, _SOME | _NARROW, _MANY | _NARROW | {"block_pair": 64}, _WORDS | _TWO, _WORDS_MANY | _TWO,
    ),
    "sm_90": (
        _FEW, _SOME, _MANY | {"num_stages": 4, "down_num_stages": 4},
        _WORDS | {"most_of_all": 31, "late": 1, "num_stages": 6, "down_num_stages": 6}, _WORDS_WIDE,
        _WORDS_MANY | {"late": 1},
    ),
}  # fmt: skip
# in fp32, without the tensor cores
SINGLE_TUNING = {"default": (_FEW | _TWO | {"most_pairs": 2**31, "block_column": 32, "down_block_column": 32},)}
# columns that a program sums up
_BLOCK_SUMMED = 1024


@triton.jit(do_not_specialize=["stride_output_row"])
def _sum_kernel(
    parts_ptr, experts_ptr, output_ptr, stride_output_row, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a row in the order of the table; those of experts that are none were not written."""
    await_predecessor(ENABLE_PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SHAPE.HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    NUM_CHOSEN: tl.constexpr = SHAPE.NUM_CHOSEN
    for index in tl.static_range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + index
        expert = tl.load(experts_ptr + pair)
        is_written = is_column & (expert >= 0) & (expert < SHAPE.NUM_EXPERTS)
        total += tl.load(parts_ptr + pair * SHAPE.HIDDEN + column, mask=is_written, other=0.0)
    tl.store(output_ptr + row * stride_output_row + column, total.to(output_ptr.dtype.element_ty), mask=is_column)


def contract(values: dict) -> check.Spec:
    args = check.Arguments("fused_experts", values)
    x = args.tensor("x", ("T", "H"), check.FLOAT, contiguous=1)
    experts = args.tensor("experts", ("T", "K"), check.INTEGER)
    args.tensor("weights", ("T", "K"), (torch.float32,))
    if args.size("H") < 1:
        args.fail("x", "have H of at least 1", args.size("H"))
    inner = check_weights(args)
    if not 1 <= args.size("E") <= MAX_EXPERTS:
        args.fail("gate_up", f"have E in 1..{MAX_EXPERTS}", args.size("E"))
    if not 1 <= args.size("K") <= MAX_CHOSEN:
        args.fail("experts", f"have K in 1..{MAX_CHOSEN}", args.size("K"))
    args.tensor("gate_up_bias", ("E", 2 * inner), (x.dtype,), optional=True)
    args.tensor("down_bias", ("E", "H"), (x.dtype,), optional=True)
    args.choice("activation", ACTIVATIONS)
    args.number("alpha")
    args.number("limit", 0.0)
    num_experts = args.size("E")
    rule = f"lie in 0..{num_experts - 1}, or be -1"
    args.debug("experts", rule, lambda: (experts >= -1) & (experts < num_experts))
    return args.spec((args.size("T"), args.size("H")), x.dtype, contiguous=1)


@launcher
def fused_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    gate_up_zeros: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None,
    *,
    weight_format: str = "16bit",
    group_size: int | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what the experts of each row compute, summed by their weights.

    Symbols: T rows; H columns, at least 1; E experts, 1..520, shared ones included; K of them for a row, 1..24; I
    inner columns of an expert, at least 1.

    Args:
        x: [T, H] fp16, bf16 or fp32. Rows may be strided.
        experts: [T, K] int32 or int64, as `route_experts` returns them. An expert outside 0..E - 1 counts for nothing;
            -1 says so.
        weights: [T, K] fp32, of the experts.
        gate_up: [E, 2 * I, H], dtype of `x`: of each expert the rows of the gate, then those of up. Quantised
            [E, I / 8, C, 16, W] int32, C = ceil(H / 128): the words of `eagle_kernels.ops.linear.shared.repack`, where
            W is 16 for 4 bits and 32 for 8.
        down: [E, H, I], dtype of `x`. Quantised [E, H / 16, ceil(I / 128), 16, W] int32.
        gate_up_bias: None or [E, 2 * I], dtype of `x`, in the order of the rows of `gate_up`.
        down_bias: None or [E, H], dtype of `x`.
        gate_up_scales: None in 16 bit. N = 2 * I rows: of groups [P, E, N, 2] fp16 or bf16 (mxfp4: bf16), P pairs of
            groups; of whole rows [E, N] fp16, bf16 or fp32 (fp8: fp32); of blocks of fp8 [C, E, N / 128] fp32.
        down_scales: None, [P, E, N, 2] fp16 or bf16, [E, N] or [C, E, N / 128], the same for N = H rows of I columns.
        gate_up_zeros: None (8 for w4, 0 for w8) or the values that stand for 0: [P, E, N, 2] int16, or of whole rows
            [E, N] uint8 (w4) or int8 (w8).
        down_zeros: None, [P, E, N, 2] int16 or [E, N], the same.
        weight_format: of both products, "16bit", "w4", "w8", "fp8" (float8_e4m3fn) or "mxfp4" (e2m1, with a scale for
            32 columns). Quantised, `x` is fp16 or bf16, H a multiple of 16 and I of 8.
        group_size: 32, 64 or 128 columns that share a scale, or None: whole rows do. fp8: 128, blocks of 128 x 128,
            which need 2 * I and H of multiples of 128, or None. mxfp4: None or 32, which it always is.
        activation: "silu", silu(gate) * up, or "swigluoai", that of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1) of
            numbers that are clamped.
        alpha: a factor of "swigluoai".
        limit: what "swigluoai" clamps to, at least 0: gate from above, up on both sides.
        interleaved: rows of gate and up of an expert take turns, as in gpt-oss.
        out: a tensor to write into. Its rows may be strided.

    Returns:
        [T, H], dtype of `x`. Products are summed in fp32, the activation is rounded to the dtype of `x`, and the sum
        over experts is fp32, rounded once. Weights times scales may be rounded to the dtype of `x` before. A row's
        bits do not depend on other rows. A NaN stays in its row.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. With EAGLE_KERNELS_DEBUG=1 also where an expert is not
            in the table, or scales are not finite.

    Source:
        The experts of transformers' Qwen3-MoE, Mixtral, ERNIE 4.5, DeepSeek-V3 and gpt-oss; the kernels are
        eagle_kernels' own.

    Example:
        >>> x, experts, weights = torch.tensor([[1.0]]), torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.25]])
        >>> gate_up = torch.tensor([[[100.0], [1.0]], [[100.0], [2.0]]])
        >>> eagle_kernels.fused_experts(x, experts, weights, gate_up, torch.ones(2, 1, 1)).tolist()
        [[125.0]]
    """
    op = "fused_experts"
    out = check.allocate(op, contract(locals()), out)
    if out.numel() == 0:
        return out
    (num_rows, hidden), num_experts = x.shape, len(down)
    inner = down.shape[2] if weight_format == "16bit" else 8 * gate_up.shape[1]
    num_chosen, num_pairs, device = experts.shape[1], experts.numel(), x.device
    shape = Shape(
        num_experts, num_chosen, hidden, inner, bool(interleaved), activation == "swigluoai", float(alpha), float(limit)
    )
    activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=device)
    parts = torch.empty((num_pairs, hidden), dtype=torch.float32, device=device)
    table, lookup = make_table(op, experts, num_experts)
    table_of_kind = SINGLE_TUNING if x.dtype == torch.float32 else TUNING
    tuned = _choose_entry(table_of_kind, num_pairs, num_experts, weight_format != "16bit", device)
    blocks = {
        "table": table, "num_pairs": num_pairs, "LOOKUP": lookup, "BLOCK_PAIR": tuned["block_pair"],
        "num_blocks": num_blocks(num_pairs, num_experts, tuned["block_pair"]),
    }  # fmt: skip
    numbers = {"gate_up": (gate_up_scales, gate_up_zeros), "down": (down_scales, down_zeros)}
    made = {
        name: format_of(weight_format, group_size, *each, tuned["late"], device) for name, each in numbers.items()
    }  # fmt: skip
    (first, *first_numbers), (second, *second_numbers) = made.values()
    gates = Product(x, gate_up, *first_numbers, gate_up_bias, activated)
    launch_gate_up(op, gates, shape, first, dict(blocks), tuned)
    downs = Product(activated, down, *second_numbers, down_bias, parts)
    launch_down(op, downs, weights, shape, second, dict(blocks), tuned)
    block_summed = min(_BLOCK_SUMMED, next_power_of_2(hidden))
    launch(
        op, _sum_kernel, (num_rows, triton.cdiv(hidden, block_summed)),
        parts_ptr=parts, experts_ptr=experts, output_ptr=out, stride_output_row=out.stride(0), SHAPE=shape,
        BLOCK=block_summed, num_warps=4,
    )  # fmt: skip
    return out


def _choose_entry(
    table: dict, num_pairs: int, num_experts: int, has_words: bool, device: torch.device
) -> dict:  # fmt: skip
    """Returns the first entry of the device's row that fits; the last one of each kind fits all."""
    average = num_pairs / min(num_pairs, num_experts)
    entries = (entry for entry in tuning.row(table, device) if entry["words"] == has_words)
    return next(entry for entry in entries if num_pairs <= entry["most_of_all"] and average <= entry["most_pairs"])
