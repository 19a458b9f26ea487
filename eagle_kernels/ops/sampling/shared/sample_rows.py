"""Draws a token from each of many rows of logits in two launches: one scans slices of rows, the next one draws.
`sample_from_logits` is nothing else; `verify_tree_sampled` draws all rows of its trees like this where they are few."""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.random import STREAM_TARGET, Coins, Noise
from ....primitives.rows import read_temperature
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import bundle, launch
from . import sampling
from .filters import FilterPointers, load_filters
from .logits import Processors, Row
from .sampling import DRAW_TUNING, Found, Share, draw_token, scan_slice

_STREAM = tl.constexpr(STREAM_TARGET)


@triton.jit(do_not_specialize=["stride_logits_row", "rows_per_request", "position_offset"])
def _sample_rows_scan_kernel(
    logits_ptr, coins, temperature_ptr, filters, processors, scratch, stride_logits_row, rows_per_request,
    position_offset, VOCAB_SIZE: tl.constexpr, HAS_FILTERS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    IS_JOINT: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Scans one slice of one row."""
    await_predecessor(ENABLE_PDL)
    index = tl.program_id(0).to(tl.int64)
    request = (tl.program_id(0) // rows_per_request).to(tl.int64)
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    row_ptr = logits_ptr + tl.multiple_of(index * stride_logits_row, ALIGNMENT)
    scan_slice(
        Row(row_ptr, processors, request, index, inverse_temperature, None, VOCAB_SIZE, HAS_PENALTIES), is_sampled,
        load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT),
        Noise(tl.load(coins.seeds + request), tl.load(coins.positions + index).to(tl.int64) + position_offset, _STREAM),
        Share(scratch, index, index), Found(None, False), tl.program_id(1), HAS_FILTERS, BLOCK_CHUNK=BLOCK_CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_logits_row", "rows_per_request", "position_offset"])
def _sample_rows_draw_kernel(
    logits_ptr, coins, temperature_ptr, filters, processors, scratch, tokens_ptr, stride_logits_row, rows_per_request,
    position_offset, VOCAB_SIZE: tl.constexpr, HAS_FILTERS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    IS_JOINT: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Draws the token of one scanned row."""
    await_predecessor(ENABLE_PDL)
    index = tl.program_id(0).to(tl.int64)
    request = (tl.program_id(0) // rows_per_request).to(tl.int64)
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    row_ptr = logits_ptr + tl.multiple_of(index * stride_logits_row, ALIGNMENT)
    token, _, _ = draw_token(
        Row(row_ptr, processors, request, index, inverse_temperature, None, VOCAB_SIZE, HAS_PENALTIES),
        load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT),
        Noise(tl.load(coins.seeds + request), tl.load(coins.positions + index).to(tl.int64) + position_offset, _STREAM),
        Share(scratch, index, index), HAS_FILTERS, BLOCK_CHUNK,
    )  # fmt: skip
    tl.store(tokens_ptr + index, token.to(tokens_ptr.dtype.element_ty))


def sample_rows(
    op: str, values: dict, rows: torch.Tensor, tokens: torch.Tensor, *, rows_per_request: int, position_offset: int
) -> None:
    """Draws `tokens` [R] from the logits `rows` [R, V], by the parameters and processors among the op's values.
    rows_per_request: rows that share one entry of each parameter; the bitmask has one for every row.
    position_offset: what the position of a row's token has over that of the row."""
    num_rows, device = len(rows), rows.device
    shared = {
        "logits_ptr": rows, "stride_logits_row": rows.stride(0), "rows_per_request": rows_per_request,
        "position_offset": position_offset, "coins": bundle(Coins, values), "temperature_ptr": values["temperature"],
        "filters": bundle(FilterPointers, values), "processors": bundle(Processors, values),
        "scratch": sampling.allocate_scratch(values, rows, num_rows), **sampling.constants(values, rows),
    }  # fmt: skip
    scan = shared | {"num_warps": sampling.scan_tuning(values, device)["num_warps"]}
    launch(op, _sample_rows_scan_kernel, (num_rows, sampling.num_slices(values, rows)), **scan)
    launch(op, _sample_rows_draw_kernel, (num_rows,), **shared, tokens_ptr=tokens, **tuning.row(DRAW_TUNING, device))
