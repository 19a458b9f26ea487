"""Rotary position embedding of queries and keys.

Computes: The turns of primitives/rotary.py. Partial rotary embedding is a matter of the tables, and so is every scaling
    of frequencies (linear, llama3, yarn with its attention factor).
Invariants: An element depends on its own pair and angle alone. Bits are those of PyTorch's `a * cos - b * sin`:
    products are not fused into sums.
Grid: (T, head tiles), one program rotates a few query heads or a few key heads of one of T tokens.
Launches: 1
Traffic: 2 * element bytes * T * (Hq + Hkv) * D, and a row of each table per token
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives import rotary
from ...primitives.dependent_launch import await_predecessor
from ...primitives.rotary import TABLE_NUMBERS, TableSizes, load_angles, move_heads
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `rope` returns."""

    query: torch.Tensor
    key: torch.Tensor


IN_PLACE = {"query": ("query",), "key": ("key",)}

# tile_elements: those of the heads that a program turns, 8 a thread.
TUNING = {"default": {"tile_elements": 1024, "num_warps": 4}}


@triton.jit(do_not_specialize=[*TABLE_NUMBERS, "stride_query_token", "stride_query_head", "stride_key_token",
                               "stride_key_head", "stride_output_query_token", "stride_output_query_head",
                               "stride_output_key_token", "stride_output_key_head"])  # fmt: skip
def _rope_kernel(
    query_ptr, key_ptr, tables, out,
    num_positions_columns, stride_positions_row, stride_positions_column, num_positions, stride_cos_position,
    stride_sin_position, stride_query_token, stride_query_head, stride_key_token, stride_key_head,
    stride_output_query_token, stride_output_query_head, stride_output_key_token, stride_output_key_head,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, BLOCK_HEAD: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEAD
    first_key = tl.cdiv(NUM_QUERY_HEADS, BLOCK_HEAD) * BLOCK_HEAD
    sizes = TableSizes(
        num_positions, stride_cos_position, stride_sin_position,
        num_positions_columns, stride_positions_row, stride_positions_column,
    )  # fmt: skip
    angles = load_angles(tables, sizes, tl.program_id(0), ROTARY_DIM)
    head = first_head.to(tl.int64) + tl.arange(0, BLOCK_HEAD)
    if first_head < first_key:
        move_heads(
            query_ptr, out.query, token * stride_query_token + head * stride_query_head,
            token * stride_output_query_token + head * stride_output_query_head, head < NUM_QUERY_HEADS, True,
            angles, 1.0, HEAD_DIM=HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=IS_INTERLEAVED, FP8_BIAS=0,
        )  # fmt: skip
    else:
        head -= first_key
        move_heads(
            key_ptr, out.key, token * stride_key_token + head * stride_key_head,
            token * stride_output_key_token + head * stride_output_key_head, head < NUM_KV_HEADS, True, angles, 1.0,
            HEAD_DIM=HEAD_DIM, ROTARY_DIM=ROTARY_DIM, IS_INTERLEAVED=IS_INTERLEAVED, FP8_BIAS=0,
        )  # fmt: skip


def contract(values: dict) -> Output:
    args = check.Arguments("rope", values)
    query = rotary.check_heads(args, "query", "Hq", check.FLOAT)
    key = rotary.check_heads(args, "key", "Hkv", (query.dtype,))
    rotary.check_tables(args, query.dtype)
    return Output(*(args.spec(tuple(heads.shape), query.dtype, contiguous=1) for heads in (query, key)))


@launcher
def rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool = False,
    out: Output | None = None,
) -> Output:
    """Rotates queries and keys by the angles of their positions (rotary position embedding).

    Symbols: T tokens, Hq query heads, Hkv KV heads, D elements of a head, 1..1024. A pair (a, b) of elements becomes
    (a cos - b sin, b cos + a sin); elements from rotary_dim on stay.

    Args:
        query: [T, Hq, D] fp16, bf16 or fp32. Tokens and heads may be strided by multiples of D.
        key: [T, Hkv, D], dtype of `query`. Strided likewise.
        positions: [T] int, or [B, T / B] with any strides. Row of `cos` and `sin` for each token.
        cos, sin: [max_positions, rotary_dim / 2] fp32, or both of the dtype of `query`. Cosine and sine of each pair's
            angle; rotary_dim / 2 is 1..D / 2. Rows may be strided, as the halves of a table that holds both are. fp32
            tables round once, at the end; those of `query`'s dtype round each product, as in Hugging Face's models.
        is_interleaved: pairs are the elements 2 i and 2 i + 1 (GPT-J) instead of i and rotary_dim / 2 + i (GPT-NeoX,
            Llama).
        out: two tensors to write into, strided by multiples of D. (query, key) works in place.

    Returns:
        A named tuple:
        query: [T, Hq, D], dtype of `query`.
        key: [T, Hkv, D], dtype of `query`.
        Heads of a token whose position is outside 0..max_positions - 1 are copied as they are.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        RoFormer, https://arxiv.org/abs/2104.09864, rounded as in Hugging Face's models.

    Example:
        >>> heads = torch.tensor([[[1.0, 2.0]]])  # one head of one pair
        >>> cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])  # angles of 0 and 90 degrees
        >>> eagle_kernels.rope(heads, heads, torch.tensor([1]), cos, sin).query.tolist()
        [[[-2.0, 1.0]]]
    """
    out = check.allocate("rope", contract(locals()), out)
    rotary.check_out("rope", **{"out.query": out.query, "out.key": out.key})
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    tuned = dict(tuning.row(TUNING, query.device))
    block_head = rotary.tile_of_heads(max(num_query_heads, num_kv_heads), head_dim, tuned.pop("tile_elements"))
    launch(
        "rope", _rope_kernel,
        (num_tokens, triton.cdiv(num_query_heads, block_head) + triton.cdiv(num_kv_heads, block_head)),
        query_ptr=query, key_ptr=key, out=out,
        NUM_QUERY_HEADS=num_query_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        IS_INTERLEAVED=bool(is_interleaved), BLOCK_HEAD=block_head, enable_fp_fusion=False,
        **rotary.table_arguments(positions, cos, sin), **rotary.head_strides("query", query),
        **rotary.head_strides("key", key), **rotary.head_strides("output_query", out.query),
        **rotary.head_strides("output_key", out.key), **tuned,
    )  # fmt: skip
    return out
