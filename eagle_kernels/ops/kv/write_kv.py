"""Writes new keys and values into the paged cache, in one launch with the rotary embedding that comes before it.

Computes: k_cache[slots[t]] = key[t], v_cache[slots[t]] = value[t]; slot s is row s % page_size of page s // page_size.
    With tables cos and sin, keys are rotated on their way, and so are queries if there are any: the bits are those of
    `rope` and a write after it. A cache of 8 bits gets elements divided by their scale (primitives/fp8.py).
Invariants: Nothing is written in the caches but the slots of the tokens. Queries are rotated whatever the slot of their
    token. In caches of more bits elements keep their own, NaN as well.
Grid: (T, head tiles), one program moves a few heads of one of T tokens: of keys and values (of either, with a few
    tokens), or of queries.
Launches: 1
Traffic: element bytes * T * (2 * Hkv + 2 * Hq) * D, cache element bytes * 2 * T * Hkv * D, and a row of each table a
    token; for Hq query heads and Hkv KV heads of D elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...primitives import fp8, rotary
from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import check_pool, slot_strides
from ...primitives.rotary import TABLE_NUMBERS, TableSizes, load_angles, move_heads
from ...primitives.strides import check_tokens, of_token, token_arguments, token_sizes
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher

MUTATES = ("k_cache", "v_cache")
IN_PLACE = {"out": ("query",)}

# tile_elements: those of the heads that a program moves, 8 a thread. few_tokens: with up to so many tokens, keys and
# values have programs of their own, which run side by side.
TUNING = {"default": {"tile_elements": 1024, "num_warps": 4, "few_tokens": 32}}


class Inputs(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    key: Any
    value: Any
    query: Any
    slots: Any
    k_scale: Any
    v_scale: Any


class Outputs(NamedTuple):
    """Pointers to the caches, bytes if they hold 8-bit floats, and to the rotated query."""

    k_cache: Any
    v_cache: Any
    query: Any


class Shape(NamedTuple):
    """The constants of a call."""

    PAGE_SIZE: int
    STRIDE_TOKEN: int  # of the slots of a page in the caches, in rows of HEAD_DIM
    STRIDE_HEAD: int  # of the heads of a slot, likewise
    NUM_KV_HEADS: int
    NUM_QUERY_HEADS: int
    HEAD_DIM: int
    IS_INTERLEAVED: bool
    FP8_BIAS: int  # of the caches' 8-bit float; 0: they hold int8, or elements of the keys' dtype


@triton.jit(
    do_not_specialize=[*token_sizes("slots"), *TABLE_NUMBERS, "num_pages", "stride_key_token", "stride_key_head",
                       "stride_value_token", "stride_value_head", "stride_query_token", "stride_query_head",
                       "stride_output_token", "stride_output_head", "stride_k_page", "stride_v_page",
                       "stride_k_scale_head", "stride_v_scale_head"]
)  # fmt: skip
def _write_kv_kernel(
    inputs, tables, out,
    num_slots_columns, stride_slots_row, stride_slots_column, num_pages,
    num_positions, stride_cos_position, stride_sin_position,
    num_positions_columns, stride_positions_row, stride_positions_column,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_query_token, stride_query_head, stride_output_token, stride_output_head,
    stride_k_page, stride_v_page, stride_k_scale_head, stride_v_scale_head,
    SHAPE: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr, IS_APART: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Moves one tile of heads of one token. IS_APART: keys and values are moved by programs of their own."""
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_kv_tiles = tl.cdiv(SHAPE.NUM_KV_HEADS, BLOCK_HEAD)
    place = of_token(tl.program_id(0), num_slots_columns, stride_slots_row, stride_slots_column)
    slot = tl.load(inputs.slots + place).to(tl.int64)
    page = slot // SHAPE.PAGE_SIZE
    is_written = (slot >= 0) & (page < num_pages)
    row_in_page = (slot % SHAPE.PAGE_SIZE) * SHAPE.STRIDE_TOKEN
    block = tl.arange(0, BLOCK_HEAD).to(tl.int64)
    sizes = TableSizes(
        num_positions, stride_cos_position, stride_sin_position, num_positions_columns, stride_positions_row,
        stride_positions_column,
    )  # fmt: skip

    first_query = (2 if IS_APART else 1) * num_kv_tiles
    if tile < first_query:
        head = tile % num_kv_tiles * BLOCK_HEAD + block
        is_head = head < SHAPE.NUM_KV_HEADS
        if not IS_APART or tile < num_kv_tiles:
            angles = load_angles(tables, sizes, tl.program_id(0), ROTARY_DIM)
            move_heads(
                inputs.key, out.k_cache, token * stride_key_token + head * stride_key_head,
                page * stride_k_page + row_in_page + head * SHAPE.STRIDE_HEAD, is_head, is_written, angles,
                _load_scale(inputs.k_scale, head, is_head, stride_k_scale_head),
                HEAD_DIM=SHAPE.HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED,
                FP8_BIAS=SHAPE.FP8_BIAS,
            )  # fmt: skip
        if not IS_APART or tile >= num_kv_tiles:
            move_heads(
                inputs.value, out.v_cache, token * stride_value_token + head * stride_value_head,
                page * stride_v_page + row_in_page + head * SHAPE.STRIDE_HEAD, is_head, is_written, None,
                _load_scale(inputs.v_scale, head, is_head, stride_v_scale_head),
                HEAD_DIM=SHAPE.HEAD_DIM, ROTARY_DIM=0, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED, FP8_BIAS=SHAPE.FP8_BIAS,
            )  # fmt: skip
    elif SHAPE.NUM_QUERY_HEADS > 0:
        head = (tile - first_query) * BLOCK_HEAD + block
        angles = load_angles(tables, sizes, tl.program_id(0), ROTARY_DIM)
        move_heads(
            inputs.query, out.query, token * stride_query_token + head * stride_query_head,
            token * stride_output_token + head * stride_output_head, head < SHAPE.NUM_QUERY_HEADS, True, angles, 1.0,
            HEAD_DIM=SHAPE.HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=SHAPE.IS_INTERLEAVED, FP8_BIAS=0,
        )  # fmt: skip


@triton.jit
def _load_scale(scale_ptr, head, is_head, stride_scale_head):
    """Returns the scales [HEAD, 1], or 1 where none is given."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + head * stride_scale_head, mask=is_head, other=1.0)[:, None]


def contract(values: dict) -> check.Spec:
    args = check.Arguments("write_kv", values)
    key = rotary.check_heads(args, "key", "Hkv", check.FLOAT)
    rotary.check_heads(args, "value", "Hkv", (key.dtype,))
    _check_caches(args, key.dtype)
    check_tokens(args, "slots")
    slots, num_slots = values["slots"], args.size("num_pages") * args.size("page_size")
    args.debug(
        "slots", f"be -1 or one of the {num_slots} slots of the pool", lambda: (slots >= -1) & (slots < num_slots)
    )
    tables = ("positions", "cos", "sin")
    has_tables = any(values[name] is not None for name in tables)
    if has_tables:
        rotary.check_tables(args, key.dtype)
    num_query_heads = 0
    if values["query"] is not None:
        if not has_tables:
            args.fail("query", "come with positions, cos and sin, without which it stays as it is", "none of them")
        num_query_heads = rotary.check_heads(args, "query", "Hq", (key.dtype,)).shape[1]
    return args.spec((args.size("T"), num_query_heads, args.size("D")), key.dtype, contiguous=1)


def _check_caches(args: check.Arguments, dtype: torch.dtype) -> None:
    """Checks the caches, and their scales, for keys of this dtype."""
    check_pool(args, (dtype, *fp8.CODES))
    k_cache = args.values["k_cache"]
    if args.size("page_size") < 1:
        args.fail("k_cache", "have a page size of at least 1", args.size("page_size"))
    for name in ("k_scale", "v_scale"):
        scale = args.values[name]
        if scale is None:
            continue
        is_scalar = isinstance(scale, torch.Tensor) and scale.dim() == 0
        args.tensor(name, () if is_scalar else (None,), (torch.float32,))
        if scale.numel() not in (1, args.size("Hkv")):
            args.fail(name, f"have 1 or Hkv = {args.size('Hkv')} elements", list(scale.shape))
        if k_cache.dtype not in fp8.CODES:
            args.fail(name, "come with caches of 8 bits", k_cache.dtype)


@launcher
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    is_interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes keys and values into the paged cache, and rotates keys and queries on the way.

    Args:
        key, value: [T, Hkv, D] fp16, bf16 or fp32, both of one dtype; T tokens, D in 1..1024. Tokens and heads may be
            strided by multiples of D.
        k_cache, v_cache: [num_pages, page_size, Hkv, D] fp16, bf16 or fp32 as `key`, int8, or fp8: float8_e4m3fn (sm_89
            or later, gfx950) or float8_e4m3fnuz (gfx942). Both of one shape and dtype, in place; page_size is at least
            1. Pages, slots and heads may be strided by multiples of D, slots and heads of both caches alike: as parts
            of one tensor, or heads outside of slots.
        slots: [T] int, or [B, T / B] with any strides. page * page_size + offset of each token. A token with a slot
            outside the pool, such as -1, is not written.
        query: None or [T, Hq, D] fp16, bf16 or fp32, as `key`, strided likewise. Needs the three tables below.
        positions: None or [T] int, or [B, T / B] with any strides. Row of `cos` and `sin` for each token; heads of a
            token whose position is outside the tables are not rotated.
        cos, sin: None or [max_positions, rotary_dim / 2] fp32, or fp16 or bf16 as `key`; both of one dtype. Cosine and
            sine of each pair's angle, as in `rope`; rotary_dim / 2 is 1..D / 2. Rows may be strided. Without the three
            tables nothing is rotated.
        is_interleaved: pairs are the coordinates 2 i and 2 i + 1 (GPT-J) instead of i and rotary_dim / 2 + i (GPT-NeoX,
            Llama).
        k_scale, v_scale: None, or [], [1] or [Hkv] fp32. Divisors of keys and values, one for all heads or one per
            head; only with fp8 and int8 caches. Must be above 0, unchecked. None: 1.
        out: a tensor to write into, strided by multiples of D. It may be `query` itself.

    Returns:
        [T, Hq, D] fp16, bf16 or fp32, as `key`. The rotated query; without `query` [T, 0, D]. A slot that two tokens
        share holds elements of either. Elements for an fp8 cache are rounded to nearest and limited to its largest
        finite value; NaN stays NaN. Those for an int8 cache are limited to -127..127, and NaN becomes 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses slots outside the pool other than -1.

    Source:
        RoFormer, https://arxiv.org/abs/2104.09864 (rotation), rounded as in Hugging Face's models. Doing it in one
        launch is eagle_kernels' own.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)  # two pages of two slots
        >>> key = value = torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1)
        >>> _ = eagle_kernels.write_kv(key, value, k_cache, v_cache, torch.tensor([3, 0, -1]))
        >>> k_cache.flatten().tolist()
        [6.0, 0.0, 0.0, 5.0]
    """
    contracted = contract(locals())
    fp8.check_target("write_kv", "k_cache", k_cache)
    out = check.allocate("write_kv", contracted, out)
    rotary.check_out("write_kv", out=out)
    num_tokens, num_query_heads, head_dim = out.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    fp8_bias = fp8.BIAS.get(k_cache.dtype, 0)
    tuned = dict(tuning.row(TUNING, key.device))
    is_apart = num_tokens <= tuned.pop("few_tokens")
    block_head = rotary.tile_of_heads(max(num_query_heads, num_kv_heads), head_dim, tuned.pop("tile_elements"))
    num_kv_tiles = (1 + is_apart) * triton.cdiv(num_kv_heads, block_head)
    launch(
        "write_kv", _write_kv_kernel, (num_tokens, num_kv_tiles + triton.cdiv(num_query_heads, block_head)),
        inputs=Inputs(key, value, query, slots, k_scale, v_scale),
        out=Outputs(
            k_cache.view(torch.uint8) if fp8_bias else k_cache,
            v_cache.view(torch.uint8) if fp8_bias else v_cache,
            None if query is None else out,
        ),
        **token_arguments("slots", slots), num_pages=num_pages,
        stride_k_page=k_cache.stride(0) // head_dim, stride_v_page=v_cache.stride(0) // head_dim,
        stride_k_scale_head=int(k_scale is not None and k_scale.numel() > 1),  # 0: all heads share one
        stride_v_scale_head=int(v_scale is not None and v_scale.numel() > 1),
        SHAPE=Shape(
            page_size, *slot_strides(k_cache), num_kv_heads, num_query_heads, head_dim, bool(is_interleaved), fp8_bias
        ),
        BLOCK_HEAD=block_head, IS_APART=is_apart, enable_fp_fusion=False, **rotary.table_arguments(positions, cos, sin),
        **rotary.head_strides("key", key), **rotary.head_strides("value", value),
        **rotary.head_strides("query", out if query is None else query), **rotary.head_strides("output", out), **tuned,
    )  # fmt: skip
    return out
