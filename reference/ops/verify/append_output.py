"""Reference of append_output: one token after another."""

from typing import NamedTuple

import torch

from ...slots import lengths


class Output(NamedTuple):
    new_num_tokens: torch.Tensor
    tokens: torch.Tensor
    num_kept: torch.Tensor
    finish_reason: torch.Tensor


def append_output(
    token_ids: torch.Tensor, num_tokens: torch.Tensor, num_prompt_tokens: torch.Tensor, tokens: torch.Tensor,
    max_tokens: torch.Tensor | None = None, end_token_ids: torch.Tensor | None = None,
    stop_sequences: torch.Tensor | None = None, min_tokens: torch.Tensor | None = None,
    is_live: torch.Tensor | None = None, rows: torch.Tensor | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/append_output.py."""
    num_rows, row_size = token_ids.shape
    batch_size, device = len(tokens), tokens.device
    nothing = torch.zeros(batch_size, dtype=torch.int32, device=device)
    padding = torch.full(tokens.shape, -1, dtype=torch.int64, device=device)
    out = Output(num_tokens.clone(), padding, nothing, nothing.clone())
    prompts = lengths(num_prompt_tokens)
    least = None if min_tokens is None else lengths(min_tokens)
    rooms = [row_size] * batch_size if max_tokens is None else lengths(max_tokens)
    for request, step in enumerate(tokens.tolist()):
        row = request if rows is None else int(rows[request])
        is_dead = is_live is not None and not is_live[request]
        if is_dead or not 0 <= row < num_rows or not _is_id(step[0]):
            continue
        length, prompt = min(max(int(num_tokens[request]), 0), row_size), prompts[request]
        room = min(row_size, rooms[request])
        ends = [] if end_token_ids is None else end_token_ids.expand(batch_size, -1)[request].tolist()
        stops = [] if stop_sequences is None else _without_padding(stop_sequences[request].tolist())
        text, reason = token_ids[row, :length].tolist(), 3 if length >= room else 0
        for token in step:
            if reason or not _is_id(token):
                break
            text.append(token)
            is_long_enough = least is None or len(text) - prompt >= least[request]
            if is_long_enough and token in ends:
                reason = 1
            elif is_long_enough and any(_ends_with(text, prompt, stop) for stop in stops):
                reason = 2
            elif len(text) >= room:
                reason = 3
        kept = torch.tensor(text[length:], dtype=torch.int64, device=device)
        token_ids[row, length : len(text)] = kept.to(token_ids.dtype)
        out.tokens[request, : len(kept)] = kept
        out.new_num_tokens[request] = len(text)
        out.num_kept[request] = len(kept)
        out.finish_reason[request] = reason
    return out


def _is_id(token: int) -> bool:
    return 0 <= token < 2**31


def _without_padding(sequences: list[list[int]]) -> list[list[int]]:
    """Returns what comes after each sequence's last number below 0; sequences of nothing are left out."""
    begins = [max((place + 1 for place, token in enumerate(one) if token < 0), default=0) for one in sequences]
    return [one[begin:] for one, begin in zip(sequences, begins) if begin < len(one)]


def _ends_with(text: list[int], prompt: int, stop: list[int]) -> bool:
    """Tells whether the output, which is what comes after the prompt, ends with `stop`."""
    begin = len(text) - len(stop)
    return begin >= prompt and text[begin:] == stop
