"""Appends a step's tokens to every request's tokens, in place, up to the token that ends the request.

Computes: For every token of the step, whether it ends the request: as an end token, by completing a stop sequence (a
    window of the output that ends at it), or by filling the room. Tokens up to the first such one are kept.
Invariants: In token_ids the kept tokens are written, and nothing else. Numbers of tokens below 0 count as 0.
Grid: (B,), one program appends one request's tokens.
Launches: 1
Traffic: Per request 16 T + 24 bytes, E and Q * W ids, and the W - 1 tokens before the step's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import read_lengths
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher

MUTATES = ("token_ids",)

MAX_STOP_TOKENS = 1024

# tile_elements: how many pairs of a token and an id are compared at once
TUNING = {"default": {"tile_elements": 1024, "num_warps": 1}}


class Requests(NamedTuple):
    """Pointers to the op's arguments of these names, [B] each; None: not given."""

    num_tokens: Any
    num_prompt_tokens: Any
    max_tokens: Any
    min_tokens: Any
    is_live: Any
    rows: Any


class Output(NamedTuple):
    """What `append_output` returns."""

    new_num_tokens: torch.Tensor
    tokens: torch.Tensor
    num_kept: torch.Tensor
    finish_reason: torch.Tensor


@triton.jit(do_not_specialize=["stride_token_ids_row", "stride_end_token_ids_batch", "num_rows", "row_size",
                               "num_ends", "num_stops", "stop_size"])  # fmt: skip
def _append_output_kernel(
    token_ids_ptr, tokens_ptr, requests, end_token_ids_ptr, stop_sequences_ptr, out,
    stride_token_ids_row, stride_end_token_ids_batch, num_rows, row_size, num_ends, num_stops, stop_size,
    NUM_COLUMNS: tl.constexpr, BLOCK_END: tl.constexpr, BLOCK_STEP: tl.constexpr, BLOCK_STOP: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, next_power_of_2(NUM_COLUMNS))
    in_row = column < NUM_COLUMNS
    step_ptr = tokens_ptr + request * NUM_COLUMNS
    token = tl.load(step_ptr + column, mask=in_row, other=-1).to(tl.int64)
    num_tokens = tl.load(requests.num_tokens + request)
    prompt = read_lengths(requests.num_prompt_tokens, request, True)
    row = request
    if requests.rows is not None:
        row = tl.load(requests.rows + request).to(tl.int64)
    is_live = (row >= 0) & (row < num_rows)
    if requests.is_live is not None:
        is_live &= tl.load(requests.is_live + request) != 0
    row_ptr = token_ids_ptr + row * stride_token_ids_row
    is_token = (token >= 0) & (token < 2147483648)
    count = tl.where(is_live, tl.min(tl.where(is_token, NUM_COLUMNS, column)), 0)

    length = tl.minimum(read_lengths(requests.num_tokens, request, True), row_size)
    room = row_size.to(tl.int64)
    if requests.max_tokens is not None:
        room = tl.minimum(room, read_lengths(requests.max_tokens, request, True))
    # for each reason the column of the first token that ends the request, NUM_COLUMNS if there is none
    length_at = tl.minimum(tl.maximum(room - length, 0) - 1, NUM_COLUMNS)
    first = 0  # the column from which on end tokens and stop sequences count
    if requests.min_tokens is not None:
        first = read_lengths(requests.min_tokens, request, True) - (length - prompt) - 1
    end_at = tl.full([], NUM_COLUMNS, tl.int32)
    if end_token_ids_ptr is not None:
        end_ptr = end_token_ids_ptr + request * stride_end_token_ids_batch
        for start in range(0, num_ends, BLOCK_END):
            place = start + tl.arange(0, BLOCK_END)
            end = tl.load(end_ptr + place, mask=place < num_ends, other=-1).to(tl.int64)
            is_end = tl.max((token[:, None] == end[None, :]).to(tl.int32), axis=1) > 0
            end_at = tl.minimum(end_at, _first_column(column, is_end & (column >= first), NUM_COLUMNS))
    stop_at = tl.full([], NUM_COLUMNS, tl.int32)
    if stop_sequences_ptr is not None:
        stop_ptr = stop_sequences_ptr + request * num_stops * stop_size
        for start in range(0, NUM_COLUMNS, BLOCK_STEP):
            last = start + tl.arange(0, BLOCK_STEP)
            window = _load_window(row_ptr, step_ptr, length, prompt, last, count, stop_size, BLOCK_WINDOW)
            for begin in range(0, num_stops, BLOCK_STOP):
                stop = begin + tl.arange(0, BLOCK_STOP)
                is_stop = _completes(window, stop_ptr, stop, stop < num_stops, stop_size, BLOCK_WINDOW)
                stop_at = tl.minimum(stop_at, _first_column(last, is_stop & (last >= first), NUM_COLUMNS))

    ends_at = tl.minimum(tl.minimum(end_at, stop_at), length_at)
    is_finished = (count > 0) & (ends_at < count)
    kept = tl.where(is_finished, ends_at + 1, count)
    reason = tl.where(ends_at == end_at, 1, tl.where(ends_at == stop_at, 2, 3))
    is_kept = column < kept
    tl.store(row_ptr + length + column, token.to(token_ids_ptr.dtype.element_ty), mask=is_kept)
    tl.store(out.tokens + request * NUM_COLUMNS + column, tl.where(is_kept, token, -1), mask=in_row)
    new_num_tokens = tl.where(count > 0, length + kept, num_tokens.to(tl.int64))
    tl.store(out.new_num_tokens + request, new_num_tokens.to(num_tokens.dtype))
    tl.store(out.num_kept + request, kept.to(tl.int32))
    tl.store(out.finish_reason + request, tl.where(is_finished, reason, 0))


@triton.jit
def _first_column(column, is_wanted, NUM_COLUMNS: tl.constexpr):
    """Returns the first wanted column, NUM_COLUMNS if none is wanted."""
    return tl.min(tl.where(is_wanted, column, NUM_COLUMNS))


@triton.jit
def _load_window(row_ptr, step_ptr, length, prompt, last, count, stop_size, BLOCK_WINDOW: tl.constexpr):
    """Returns the stop_size output tokens int64 [last, window] up to each column `last` of the step; -2 for none."""
    offset = last[:, None] - stop_size + 1 + tl.arange(0, BLOCK_WINDOW)[None, :]  # from the step's first token
    is_output = (offset <= last[:, None]) & (length + offset >= prompt)
    before = tl.load(row_ptr + length + offset, mask=is_output & (offset < 0) & (count > 0), other=-2).to(tl.int64)
    inside = tl.load(step_ptr + offset, mask=is_output & (offset >= 0) & (offset < count), other=-2).to(tl.int64)
    return tl.where(offset < 0, before, inside)


@triton.jit
def _completes(window, stop_ptr, stop, is_stop, stop_size, BLOCK_WINDOW: tl.constexpr):
    """Tells of each window [last, window] whether its last token completes one of these stop sequences; [last]."""
    place = tl.arange(0, BLOCK_WINDOW)[None, :]
    is_place = is_stop[:, None] & (place < stop_size)
    sequence = tl.load(stop_ptr + stop[:, None] * stop_size + place, mask=is_place, other=-1).to(tl.int64)
    padding = tl.max(tl.where((sequence < 0) & (place < stop_size), place, -1), axis=1)  # its last column
    is_part = (place > padding[:, None]) & (place < stop_size)
    is_different = (window[:, None, :] != sequence[None, :, :]) & is_part[None, :, :]
    is_complete = (tl.max(is_different.to(tl.int32), axis=2) == 0) & (padding < stop_size - 1)[None, :]
    return tl.max(is_complete.to(tl.int32), axis=1) > 0


def contract(values: dict) -> Output:
    args = check.Arguments("append_output", values)
    token_ids = args.tensor("token_ids", ("R", "L"), check.INTEGER, contiguous=1)
    num_tokens = args.tensor("num_tokens", ("B",), check.INTEGER)
    args.tensor("num_prompt_tokens", ("B",), check.INTEGER)
    tokens = args.tensor("tokens", ("B", "T"), check.INTEGER)
    batch_size = args.size("B")
    if args.size("T") == 0:
        args.fail("tokens", "have at least one column", list(tokens.shape))
    args.tensor("max_tokens", ("B",), check.INTEGER, optional=True)
    ends = values["end_token_ids"]
    is_shared = isinstance(ends, torch.Tensor) and ends.dim() == 1
    args.tensor("end_token_ids", ("E",) if is_shared else ("B", "E"), check.INTEGER, optional=True)
    stops = args.tensor("stop_sequences", ("B", "Q", "W"), check.INTEGER, optional=True)
    if stops is not None and args.size("W") > MAX_STOP_TOKENS:
        args.fail("stop_sequences", f"have at most {MAX_STOP_TOKENS} tokens each", list(stops.shape))
    args.tensor("min_tokens", ("B",), check.INTEGER, optional=True)
    args.tensor("is_live", ("B",), (*check.INTEGER, torch.bool), optional=True)
    rows = args.tensor("rows", ("B",), check.INTEGER, optional=True)
    if rows is None and args.size("R") < batch_size:
        args.fail(
            "token_ids", f"have a row for each of B = {batch_size} requests where rows is None", list(token_ids.shape)
        )
    args.debug("num_tokens", "lie in 0..L", lambda: (num_tokens >= 0) & (num_tokens <= token_ids.shape[1]))
    tokens = args.spec((batch_size, args.size("T")), torch.int64)
    count = args.spec((batch_size,), torch.int32)
    return Output(args.spec((batch_size,), num_tokens.dtype), tokens, num_kept=count, finish_reason=count)


@launcher
def append_output(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    tokens: torch.Tensor,
    max_tokens: torch.Tensor | None = None,
    end_token_ids: torch.Tensor | None = None,
    stop_sequences: torch.Tensor | None = None,
    min_tokens: torch.Tensor | None = None,
    is_live: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    out: Output | None = None,
) -> Output:
    """Appends the step's tokens to every request's tokens, in place, up to the token that ends the request.

    Symbols: B requests, R rows of L tokens, T tokens of a step, E end tokens, Q stop sequences of W <= 1024 tokens.

    Args:
        token_ids: [R, L] int. Each request's prompt, then its output; written in place. Rows may be strided.
        num_tokens: [B] int. Tokens in the row before the step, prompt included; clamped to 0..L.
        num_prompt_tokens: [B] int. How many of these are the prompt's.
        tokens: [B, T] int. The step's tokens, -1 padded, as from `verify_commit`; above 2^31 - 1 is padding, too.
        max_tokens: None or [B] int. The most tokens in the row, prompt included. None: L.
        end_token_ids: None, [E] or [B, E] int. Tokens that end any request or each, -1 padded.
        stop_sequences: None or [B, Q, W] int. Sequences whose last token ends the request, -1 padded on the left (all
            -1: none). They may begin in the output before the step, but not in the prompt.
        min_tokens: None or [B] int. End tokens and stop sequences do not end a shorter output, themselves included.
            None: 0.
        is_live: None or [B] int or bool. 0: the request is left alone. None: all are live.
        rows: None or [B] int. Each request's own row of token_ids. None: b, with R >= B.
        out: four tensors to write into.

    Returns:
        A named tuple:
        new_num_tokens: [B] int, the dtype of num_tokens. Tokens in the row after the step.
        tokens: [B, T] int64. The kept tokens, the ending one last, -1 padded.
        num_kept: [B] int32. Their number.
        finish_reason: [B] int32. 0: not finished, 1: end token, 2: stop sequence, 3: no room; the lowest of several.

        A row that is already full keeps nothing, with reason 3. A request that has no token or no row, or is not live,
        keeps its num_tokens; its tokens are -1, the rest is 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks num_tokens.

    Source:
        eagle_kernels' own.

    Example:
        >>> token_ids = torch.tensor([[5, 6, 7, 0, 0, 0]])  # two tokens of a prompt, one of the output
        >>> step = eagle_kernels.append_output(
        ...     token_ids, torch.tensor([3]), torch.tensor([2]), torch.tensor([[8, 2, 9]]),
        ...     end_token_ids=torch.tensor([2]))
        >>> token_ids.tolist(), step.finish_reason.tolist()  # 9 comes after the end token, 2
        ([[5, 6, 7, 8, 2, 0]], [1])
    """
    values = locals()
    out = check.allocate("append_output", contract(values), out)
    batch_size, num_columns = tokens.shape
    num_ends = 0 if end_token_ids is None else end_token_ids.shape[-1]
    num_stops, stop_size = (0, 0) if stop_sequences is None else stop_sequences.shape[1:]
    tuned = dict(tuning.row(TUNING, tokens.device))
    tile = tuned.pop("tile_elements")
    block_column = next_power_of_2(num_columns)
    block_window = next_power_of_2(max(stop_size, 1))
    block_step = min(block_column, max(tile // block_window, 1))
    launch(
        "append_output", _append_output_kernel, (batch_size,),
        token_ids_ptr=token_ids, tokens_ptr=tokens, requests=bundle(Requests, values),
        end_token_ids_ptr=end_token_ids, stop_sequences_ptr=stop_sequences, out=out,
        stride_token_ids_row=token_ids.stride(0),
        stride_end_token_ids_batch=num_ends if num_ends and end_token_ids.dim() == 2 else 0,
        num_rows=token_ids.shape[0], row_size=token_ids.shape[1],
        num_ends=num_ends, num_stops=num_stops, stop_size=stop_size,
        NUM_COLUMNS=num_columns, BLOCK_END=min(next_power_of_2(max(num_ends, 1)), max(tile // block_column, 1)),
        BLOCK_STEP=block_step, BLOCK_WINDOW=block_window,
        BLOCK_STOP=min(next_power_of_2(max(num_stops, 1)), max(tile // (block_step * block_window), 1)), **tuned,
    )  # fmt: skip
    return out
