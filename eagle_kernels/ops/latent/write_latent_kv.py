"""Writes new latents and the keys beside them into the paged cache, in one launch with the rotary embedding before it.

Computes: latent_cache[slots[t]] = latent[t], rope_key[t]; slot s is row s % page_size of page s // page_size. With
    tables cos and sin the keys are rotated on their way, and so are queries if there are any, never the latents: the
    bits are those of `rope` and a write after it. A cache of 8-bit floats gets elements divided by its scale
    (primitives/fp8.py).
Invariants: Nothing is written in the cache but the slots of the tokens. Queries are rotated whatever the slot of their
    token. Without 8-bit floats elements keep their bits, NaN as well.
Grid: (T, 1 + head tiles), the first program of a token moves its row, each other a few of its query heads.
Launches: 1
Traffic: element bytes * T * (L + R + 2 * Hq * R) + cache element bytes * T * (L + R), and a row of each table a token;
    for latents of L elements, keys of R and Hq query heads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives import fp8, rotary
from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import slot_strides
from ...primitives.rotary import TABLE_NUMBERS, TableSizes, load_angles, move_heads
from ...primitives.strides import check_tokens, of_token, token_arguments, token_sizes
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.latents import MAX_LATENT_DIM, MAX_ROPE_DIM, check_pool, check_scale

MUTATES = ("latent_cache",)
IN_PLACE = {"out": ("query",)}

# tile_elements: those of the query heads that a program turns, 8 a thread.
TUNING = {"default": {"tile_elements": 1024, "num_warps": 4}}


class Inputs(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    latent: Any
    rope_key: Any
    query: Any
    slots: Any
    latent_scale: Any


class Outputs(NamedTuple):
    """Pointers to the cache, bytes if it holds 8-bit floats, and to the rotated query."""

    latent_cache: Any
    query: Any


class Shape(NamedTuple):
    """The constants of a call."""

    PAGE_SIZE: int
    STRIDE_TOKEN: int  # of the slots of a page, in rows of the cache
    LATENT_DIM: int
    ROPE_DIM: int
    UNIT: int  # in which the strides of latents and keys count
    NUM_QUERY_HEADS: int
    IS_INTERLEAVED: bool
    FP8_BIAS: int  # of the cache's 8-bit float; 0: it holds elements of the latents' dtype


@triton.jit(
    do_not_specialize=[*token_sizes("slots"), *TABLE_NUMBERS, "num_pages", "stride_latent_token",
                       "stride_key_token", "stride_query_token", "stride_query_head", "stride_output_token",
                       "stride_output_head", "stride_page"]
)  # fmt: skip
def _write_latent_kv_kernel(
    inputs, tables, out,
    num_slots_columns, stride_slots_row, stride_slots_column, num_pages,
    num_positions, stride_cos_position, stride_sin_position,
    num_positions_columns, stride_positions_row, stride_positions_column,
    stride_latent_token, stride_key_token, stride_query_token, stride_query_head, stride_output_token,
    stride_output_head, stride_page,
    SHAPE: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sizes = TableSizes(
        num_positions, stride_cos_position, stride_sin_position, num_positions_columns, stride_positions_row,
        stride_positions_column,
    )  # fmt: skip
    angles = load_angles(tables, sizes, tl.program_id(0), ROTARY_DIM)
    if tile == 0:
        place = of_token(tl.program_id(0), num_slots_columns, stride_slots_row, stride_slots_column)
        slot = tl.load(inputs.slots + place).to(tl.int64)
        page = slot // SHAPE.PAGE_SIZE
        row = page * stride_page + (slot % SHAPE.PAGE_SIZE) * SHAPE.STRIDE_TOKEN
        target_ptr = out.latent_cache + row * (SHAPE.LATENT_DIM + SHAPE.ROPE_DIM)
        here = tl.zeros([1], tl.int64)
        is_written = (slot >= 0) & (page < num_pages)
        scale = 1.0
        if inputs.latent_scale is not None:
            scale = tl.load(inputs.latent_scale)
        move_heads(
            inputs.latent + token * stride_latent_token * SHAPE.UNIT, target_ptr, here, here, here == 0,
            is_written, None, scale,
            HEAD_DIM=SHAPE.LATENT_DIM, ROTARY_DIM=0, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED, FP8_BIAS=SHAPE.FP8_BIAS,
        )  # fmt: skip
        move_heads(
            inputs.rope_key + token * stride_key_token * SHAPE.UNIT, target_ptr + SHAPE.LATENT_DIM, here, here,
            here == 0, is_written, angles, scale,
            HEAD_DIM=SHAPE.ROPE_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED,
            FP8_BIAS=SHAPE.FP8_BIAS,
        )  # fmt: skip
    elif SHAPE.NUM_QUERY_HEADS > 0:
        head = (tile - 1) * BLOCK_HEAD + tl.arange(0, BLOCK_HEAD).to(tl.int64)
        move_heads(
            inputs.query, out.query, token * stride_query_token + head * stride_query_head,
            token * stride_output_token + head * stride_output_head, head < SHAPE.NUM_QUERY_HEADS, True, angles, 1.0,
            HEAD_DIM=SHAPE.ROPE_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED, FP8_BIAS=0,
        )  # fmt: skip


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `write_latent_kv` and describes its output."""
    args = check.Arguments("write_latent_kv", values)
    latent = args.tensor("latent", ("T", "L"), check.FLOAT, contiguous=1)
    rope_key = args.tensor("rope_key", ("T", "R"), (latent.dtype,), contiguous=1)
    for name, axis, most in (("latent", "L", MAX_LATENT_DIM), ("rope_key", "R", MAX_ROPE_DIM)):
        if not 1 <= args.size(axis) <= most:
            args.fail(name, f"have {axis} in 1..{most}", args.size(axis))
    unit = math.gcd(args.size("L"), args.size("R"))
    for name, rows in (("latent", latent), ("rope_key", rope_key)):
        if args.size("T") > 1 and rows.stride(0) % unit:
            args.fail(name, f"have a stride that is a multiple of {unit}, which divides L and R", rows.stride(0))
    args.bind("D", args.size("L") + args.size("R"), "latent and rope_key")
    check_pool(args, (latent.dtype, *fp8.FP8))
    if args.size("page_size") < 1:
        args.fail("latent_cache", "have a page size of at least 1", args.size("page_size"))
    check_scale(args)
    check_tokens(args, "slots")
    slots, num_slots = values["slots"], args.size("num_pages") * args.size("page_size")
    rule = f"be -1 or one of the {num_slots} slots of the pool"
    args.debug("slots", rule, lambda: (slots >= -1) & (slots < num_slots))
    args = _of_turned_heads(args)
    has_tables = any(values[name] is not None for name in ("positions", "cos", "sin"))
    if has_tables:
        rotary.check_tables(args, latent.dtype)
    num_query_heads = 0
    if values["query"] is not None:
        if not has_tables:
            args.fail("query", "come with positions, cos and sin, without which it stays as it is", "none of them")
        num_query_heads = rotary.check_heads(args, "query", "Hq", (latent.dtype,)).shape[1]
    return args.spec((len(latent), num_query_heads, rope_key.shape[1]), latent.dtype, contiguous=1)


def _of_turned_heads(args: check.Arguments) -> check.Arguments:
    """Returns the same arguments with D bound to the size of what turns."""
    turned = check.Arguments(args.op, args.values)
    turned.tensor("rope_key", ("T", "D"), check.FLOAT, contiguous=1)
    return turned


@launcher
def write_latent_kv(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    is_interleaved: bool = False,
    latent_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes latents and their keys into the paged cache, and rotates keys and queries on the way (MLA).

    Args:
        latent: [T, L] fp16, bf16 or fp32, normalised already; T tokens, L in 1..512. Rows may be strided by multiples
            of the greatest common divisor of L and R.
        rope_key: [T, R], dtype of `latent`; R in 1..128. Strided likewise, as a part of one projection.
        latent_cache: [num_pages, page_size, L + R] fp16, bf16 or fp32 as `latent`, or fp8: float8_e4m3fn (sm_89 or
            later, gfx950) or float8_e4m3fnuz (gfx942). In place; page_size is at least 1. Pages and slots may be
            strided by multiples of L + R.
        slots: [T] int, or [B, T / B] with any strides. page * page_size + offset of each token. A token with a slot
            outside the pool, such as -1, is not written.
        query: None or [T, Hq, R], dtype of `latent`: of each head the part that turns. Tokens and heads may be strided
            by multiples of R. Needs the three tables below.
        positions: None or [T] int, or [B, T / B] with any strides. Row of `cos` and `sin` for each token; what belongs
            to a token whose position is outside the tables is not rotated.
        cos, sin: None or [max_positions, rotary_dim / 2] fp32, or fp16 or bf16 as `latent`; both of one dtype. Cosine
            and sine of each pair's angle, as in `rope`; rotary_dim / 2 is 1..R / 2. Rows may be strided. Without the
            three tables nothing is rotated.
        is_interleaved: pairs are the coordinates 2 i and 2 i + 1 (DeepSeek's checkpoints) instead of i and
            rotary_dim / 2 + i (GPT-NeoX, Llama).
        latent_scale: None or [1] fp32. Divisor of all elements; only with an fp8 cache. Must be above 0, unchecked.
            None: 1.
        out: a tensor to write into, strided by multiples of R: the last R elements of absorbed queries [T, Hq, L + R],
            for one, if R divides L. It may be `query` itself.

    Returns:
        [T, Hq, R], dtype of `latent`. The rotated query; without `query` [T, 0, R]. A slot that two tokens share holds
        elements of either. Elements for an fp8 cache are rounded to nearest and limited to its largest finite value;
        NaN stays NaN.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses slots outside the pool other than -1.

    Source:
        DeepSeek-V2, https://arxiv.org/abs/2405.04434 (a key beside the latent); RoFormer,
        https://arxiv.org/abs/2104.09864 (rotation), rounded as in Hugging Face's models.

    Example:
        >>> latent_cache = torch.zeros(2, 2, 3)  # two pages of two slots, 1 + 2 elements
        >>> latent, rope_key = torch.tensor([[5.0], [6.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> _ = eagle_kernels.write_latent_kv(latent, rope_key, latent_cache, torch.tensor([3, -1]))
        >>> latent_cache.flatten(0, 1).tolist()[-1]
        [5.0, 1.0, 2.0]
    """
    contracted = contract(locals())
    fp8.check_target("write_latent_kv", "latent_cache", latent_cache)
    out = check.allocate("write_latent_kv", contracted, out)
    rotary.check_out("write_latent_kv", out=out)
    num_tokens, num_query_heads, rope_dim = out.shape
    latent_dim, (num_pages, page_size, width) = latent.shape[1], latent_cache.shape
    unit, fp8_bias = math.gcd(latent_dim, rope_dim), fp8.BIAS.get(latent_cache.dtype, 0)
    tuned = dict(tuning.row(TUNING, latent.device))
    block_head = rotary.tile_of_heads(num_query_heads, rope_dim, tuned.pop("tile_elements"))
    launch(
        "write_latent_kv", _write_latent_kv_kernel, (num_tokens, 1 + triton.cdiv(num_query_heads, block_head)),
        inputs=Inputs(latent, rope_key, query, slots, latent_scale),
        out=Outputs(latent_cache.view(torch.uint8) if fp8_bias else latent_cache, None if query is None else out),
        **token_arguments("slots", slots), num_pages=num_pages, stride_page=latent_cache.stride(0) // width,
        stride_latent_token=latent.stride(0) // unit, stride_key_token=rope_key.stride(0) // unit,
        SHAPE=Shape(
            page_size, slot_strides(latent_cache.unsqueeze(2))[0], latent_dim, rope_dim, unit, num_query_heads,
            bool(is_interleaved), fp8_bias,
        ),
        BLOCK_HEAD=block_head, enable_fp_fusion=False, **rotary.table_arguments(positions, cos, sin),
        **rotary.head_strides("query", out if query is None else query), **rotary.head_strides("output", out), **tuned,
    )  # fmt: skip
    return out
