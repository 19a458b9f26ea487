"""Writes new keys and values into the paged cache, in one launch with the rotary embedding that comes before it.

Computes
    k_cache[slots[t]] = key[t], v_cache[slots[t]] = value[t]; slot s is row s % page_size of page s // page_size. With
    tables cos and sin the key is turned on its way, and so is the query, if there is one: bits are those of `rope` and
    then a write. A cache of 8-bit floats gets elements divided by their scale, rounded to nearest (ties to even) and
    limited to the largest finite value, so that cache * scale is near the key.
Shapes
    key        [T, Hkv, D]                       fp32 / fp16 / bf16, D in 1..1024; tokens and heads may be strided by
    value      [T, Hkv, D]                       as key                            whole rows of D (a fused projection)
    k_cache    [num_pages, page_size, Hkv, D]    as key, or float8_e4m3fn / float8_e4m3fnuz; in place; pages may be
    v_cache    as k_cache                                                          strided
    slots      [T]                               int, or [B, T / B] with any strides
    query      [T, Hq, D]                        as key, optional; only with tables, strided as key
    positions  as slots                          int, with
    cos        [max_positions, rotary_dim / 2]   as key, or fp32, and
    sin        as cos                            optional all three, see rope.py
    k_scale    [], [1] or [Hkv]                  fp32 > 0, optional; only with 8-bit caches
    v_scale    as k_scale
    -> query   [T, Hq, D]                        as key, turned; without a query [T, 0, D]
Invariants
    A slot outside 0..num_pages * page_size - 1, such as -1, is not written, and nothing else in the caches is. A slot
    that two tokens name holds elements of either. Queries are turned whatever the slot of their token; `out=query` does
    it in place. Without 8-bit floats elements keep their bits, NaN as well; with them a NaN stays one.
Grid
    (T, head tiles), one program moves a few heads of one token: of keys, of values or of queries.
Launches
    1
Traffic
    element bytes * T * (2 * Hkv + 2 * Hq) * D, cache element bytes * 2 * T * Hkv * D, and a row of each table a token.

float8_e4m3fn needs sm_89 or up, or gfx950; float8_e4m3fnuz needs gfx942. Elsewhere the launcher refuses them before it
compiles anything (runtime/target.py); references know both everywhere.
"""

from __future__ import annotations

import torch

from ...primitives import fp8, rotary
from ...primitives.dependent_launch import await_predecessor
from ...primitives.paging import check_row_strides
from ...primitives.rotary import Tables, load_angles, move_heads
from ...primitives.strides import check_tokens, of_token, token_arguments, token_sizes
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher

MUTATES = ("k_cache", "v_cache")
IN_PLACE = {"out": ("query",)}

TUNING = {"default": {"tile_elements": 1024, "num_warps": 4}}


@triton.jit(
    do_not_specialize=[*token_sizes("slots"), *token_sizes("positions"), "num_pages", "num_positions",
                       "stride_cos_position", "stride_sin_position", "stride_key_token", "stride_key_head",
                       "stride_value_token", "stride_value_head", "stride_query_token", "stride_query_head",
                       "stride_output_token", "stride_output_head", "stride_k_page", "stride_v_page",
                       "stride_k_scale_head", "stride_v_scale_head"]
)  # fmt: skip
def _write_kv_kernel(
    # inputs
    key_ptr,
    value_ptr,
    query_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_scale_ptr,
    v_scale_ptr,
    # outputs
    k_cache_ptr,
    v_cache_ptr,
    output_ptr,
    # sizes
    num_slots_columns,
    stride_slots_row,
    stride_slots_column,
    num_pages,
    num_positions_columns,
    stride_positions_row,
    stride_positions_column,
    num_positions,
    stride_cos_position,
    stride_sin_position,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_output_head,
    stride_k_page,
    stride_v_page,
    stride_k_scale_head,
    stride_v_scale_head,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_kv_tiles = tl.cdiv(NUM_KV_HEADS, BLOCK_HEAD)
    place = of_token(tl.program_id(0), num_slots_columns, stride_slots_row, stride_slots_column)
    slot = tl.load(slots_ptr + place).to(tl.int64)
    page = slot // PAGE_SIZE
    is_written = (slot >= 0) & (page < num_pages)
    row_in_page = (slot % PAGE_SIZE) * NUM_KV_HEADS
    block = tl.arange(0, BLOCK_HEAD).to(tl.int64)
    tables = Tables(
        cos_ptr, sin_ptr, stride_cos_position, stride_sin_position, num_positions, positions_ptr,
        num_positions_columns, stride_positions_row, stride_positions_column,
    )  # fmt: skip

    if tile < num_kv_tiles:
        head = tile * BLOCK_HEAD + block
        is_head = (head < NUM_KV_HEADS) & is_written
        angles = load_angles(tables, tl.program_id(0), ROTARY_DIM)
        move_heads(
            key_ptr, k_cache_ptr, token * stride_key_token + head * stride_key_head,
            page * stride_k_page + row_in_page + head, is_head, angles,
            _load_scale(k_scale_ptr, head, is_head, stride_k_scale_head),
            HEAD_DIM=HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=IS_INTERLEAVED, FP8=FP8,
        )  # fmt: skip
    elif tile < 2 * num_kv_tiles:
        head = (tile - num_kv_tiles) * BLOCK_HEAD + block
        is_head = (head < NUM_KV_HEADS) & is_written
        move_heads(
            value_ptr, v_cache_ptr, token * stride_value_token + head * stride_value_head,
            page * stride_v_page + row_in_page + head, is_head, None,
            _load_scale(v_scale_ptr, head, is_head, stride_v_scale_head),
            HEAD_DIM=HEAD_DIM, ROTARY_DIM=0, IS_INTERLEAVED=IS_INTERLEAVED, FP8=FP8,
        )  # fmt: skip
    elif NUM_QUERY_HEADS > 0:
        head = (tile - 2 * num_kv_tiles) * BLOCK_HEAD + block
        angles = load_angles(tables, tl.program_id(0), ROTARY_DIM)
        move_heads(
            query_ptr, output_ptr, token * stride_query_token + head * stride_query_head,
            token * stride_output_token + head * stride_output_head, head < NUM_QUERY_HEADS, angles, 1.0,
            HEAD_DIM=HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=IS_INTERLEAVED, FP8=None,
        )  # fmt: skip


@triton.jit
def _load_scale(scale_ptr, head, is_head, stride_scale_head):
    """Returns the scales [HEAD, 1], or 1 where none is given."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + head * stride_scale_head, mask=is_head, other=1.0)[:, None]


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `write_kv` and describes its output."""
    args = check.Arguments("write_kv", values)
    key = rotary.check_heads(args, "key", "Hkv", check.FLOAT)
    rotary.check_heads(args, "value", "Hkv", (key.dtype,))
    _check_caches(args, key.dtype)
    check_tokens(args, "slots")
    tables = ("positions", "cos", "sin")
    has_tables = any(values[name] is not None for name in tables)
    if has_tables:
        rotary.check_tables(args, key.dtype)
    num_query_heads = 0
    if values["query"] is not None:
        if not has_tables:
            args.fail("query", "come with positions, cos and sin: without them nothing happens to it", "none of them")
        num_query_heads = rotary.check_heads(args, "query", "Hq", (key.dtype,)).shape[1]
    return args.spec((args.size("T"), num_query_heads, args.size("D")), key.dtype, contiguous=1)


def _check_caches(args: check.Arguments, dtype: torch.dtype) -> None:
    """Checks the caches, and their scales, for keys of this dtype."""
    for name in MUTATES:
        cache = args.tensor(name, ("num_pages", "page_size", "Hkv", "D"), (dtype, *fp8.FP8), contiguous=3)
        check_row_strides(args, name, cache, 1)
    k_cache, v_cache = args.values["k_cache"], args.values["v_cache"]
    if v_cache.dtype != k_cache.dtype:
        args.fail("v_cache", f"have dtype {k_cache.dtype} like k_cache", v_cache.dtype)
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
        if k_cache.dtype not in fp8.FP8:
            args.fail(name, "come with caches of 8-bit floats", k_cache.dtype)


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
    """Writes keys and values to their slots and returns the turned query; shapes are in the module's docstring.

    slots: page * page_size + offset of each token, -1: not written.
    is_interleaved: as in `rope`. k_scale, v_scale: what keys and values are divided by, one or one per KV head.
    """
    contracted = contract(locals())
    fp8.check_target("write_kv", "k_cache", k_cache)
    out = check.allocate("write_kv", contracted, out)
    rotary.check_out("write_kv", out=out)
    num_tokens, num_kv_heads, head_dim = key.shape
    num_query_heads = out.shape[1]
    is_fp8 = k_cache.dtype in fp8.FP8
    tuned = dict(tuning.row(TUNING, key.device))
    block_head = rotary.tile_of_heads(max(num_query_heads, num_kv_heads), head_dim, tuned.pop("tile_elements"))
    launch(
        "write_kv",
        _write_kv_kernel,
        (num_tokens, 2 * triton.cdiv(num_kv_heads, block_head) + triton.cdiv(num_query_heads, block_head)),
        key_ptr=key,
        value_ptr=value,
        query_ptr=query,
        **token_arguments("slots", slots),
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        k_cache_ptr=k_cache.view(torch.uint8) if is_fp8 else k_cache,
        v_cache_ptr=v_cache.view(torch.uint8) if is_fp8 else v_cache,
        output_ptr=None if query is None else out,
        num_pages=k_cache.shape[0],
        stride_k_page=k_cache.stride(0) // head_dim,
        stride_v_page=v_cache.stride(0) // head_dim,
        stride_k_scale_head=_scale_stride(k_scale),
        stride_v_scale_head=_scale_stride(v_scale),
        PAGE_SIZE=k_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        NUM_QUERY_HEADS=num_query_heads,
        HEAD_DIM=head_dim,
        IS_INTERLEAVED=bool(is_interleaved),
        FP8=str(k_cache.dtype).removeprefix("torch.") if is_fp8 else None,
        BLOCK_HEAD=block_head,
        enable_fp_fusion=False,
        **rotary.table_arguments(positions, cos, sin),
        **rotary.head_strides("key", key),
        **rotary.head_strides("value", value),
        **rotary.head_strides("query", out if query is None else query),
        **rotary.head_strides("output", out),
        **tuned,
    )
    return out


def _scale_stride(scale: torch.Tensor | None) -> int:
    """Returns the step from one head's scale to the next one's: 0 if all heads share one."""
    return int(scale is not None and scale.numel() > 1)
