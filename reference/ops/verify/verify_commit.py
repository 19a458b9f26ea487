"""Reference of verify_commit."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    accept_lengths: torch.Tensor
    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    last_row: torch.Tensor


def verify_commit(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, seq_lens: torch.Tensor,
    is_live: torch.Tensor | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/verify_commit.py."""
    batch_size, num_columns = accept_index.shape
    num_nodes = len(predicts) // max(batch_size, 1)
    device = accept_index.device
    depth = torch.arange(num_columns, device=device)
    request = torch.arange(batch_size, device=device)
    index = accept_index.to(torch.int64)
    first_row = (request * num_nodes)[:, None]
    live = index[:, 0] >= 0
    if is_live is not None:
        live &= is_live != 0
    accepted = accept_token_num.to(torch.int64).clamp(0, num_columns - 1)
    accept_lengths = torch.where(live, accepted + 1, 0)
    is_node = (depth < accept_lengths[:, None]) & (index >= first_row) & (index < first_row + num_nodes)
    hidden_rows = torch.where(is_node, index, first_row)
    if num_nodes > 0:
        tokens = torch.where(is_node, predicts.to(torch.int64)[hidden_rows], -1)
    else:
        tokens = torch.full_like(index, -1)
    last = (accept_lengths - 1).clamp(min=0)
    return Output(
        new_seq_lens=(seq_lens + accept_lengths).to(seq_lens.dtype),
        bonus_tokens=torch.where(live, tokens.gather(1, last[:, None])[:, 0], -1),
        accept_lengths=accept_lengths.to(torch.int32),
        tokens=tokens,
        hidden_rows=hidden_rows,
        last_row=request * num_columns + last,
    )
