"""Reference of pack_verify_rows: one row after another."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    input_ids: torch.Tensor
    positions: torch.Tensor
    row_to_batch: torch.Tensor
    row_to_node: torch.Tensor
    cu_seqlens: torch.Tensor
    num_rows: torch.Tensor
    overflow: torch.Tensor


def pack_verify_rows(
    draft_tokens: torch.Tensor, num_tokens: torch.Tensor, positions: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *, max_rows: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/pack_verify_rows.py."""
    num_nodes, device = draft_tokens.shape[1], draft_tokens.device
    if positions is None:
        positions = seq_lens.to(torch.int64)[:, None] + torch.arange(num_nodes, device=device)
    tokens, places = draft_tokens.tolist(), positions.tolist()
    rows, bounds = [], [0]
    for request, count in enumerate(num_tokens.tolist()):
        for node in range(min(max(count, 0), num_nodes)):
            rows.append((max(tokens[request][node], 0), max(places[request][node], 0), request, node))
        bounds.append(min(len(rows), max_rows))
    needed, rows = len(rows), rows[:max_rows]
    unused = [(0, 0, -1, -1)] * (max_rows - len(rows))
    table = torch.tensor(rows + unused, dtype=torch.int64, device=device).view(max_rows, 4)
    input_ids, row_positions, row_to_batch, row_to_node = (column.contiguous() for column in table.unbind(1))
    return Output(
        input_ids,
        row_positions,
        row_to_batch.to(torch.int32),
        row_to_node.to(torch.int32),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        torch.tensor([len(rows)], dtype=torch.int32, device=device),
        torch.tensor([needed if needed > max_rows else 0], dtype=torch.int32, device=device),
    )
