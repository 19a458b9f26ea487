"""pack_verify_rows for batches whose requests verify from none to all of their nodes."""

import torch

from bench.harness import grid

CASES = grid(num_nodes=[6, 8, 64], batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=7, num_nodes=4)
HEADLINES = ["B=32 N=8"]

name = "B={batch_size} N={num_nodes}".format


def make(device, batch_size, num_nodes):
    """Counts 0, 1, .., N, 0, ..; room for every node, as a CUDA graph has it."""
    return {
        "draft_tokens": torch.randint(128256, (batch_size, num_nodes), device=device),
        "num_tokens": torch.arange(batch_size, dtype=torch.int32, device=device) % (num_nodes + 1),
        "seq_lens": torch.full((batch_size,), 1024, dtype=torch.int32, device=device),
        "max_rows": batch_size * num_nodes,
    }


def count_bytes(batch_size, num_nodes):
    """Tokens of the rows read as int64, lengths and counts as int32, outputs of all the room written."""
    rows = sum(request % (num_nodes + 1) for request in range(batch_size))
    return 8 * rows + 8 * batch_size + 24 * batch_size * num_nodes + 4 * (batch_size + 3)


def prepare_torch(values):
    """Without a wait for the number of rows: the nodes are sorted, those that have a row to the front."""
    tokens, counts, max_rows = values["draft_tokens"], values["num_tokens"], values["max_rows"]
    batch_size, num_nodes = tokens.shape
    node = torch.arange(num_nodes, device=tokens.device)
    row = torch.arange(max_rows, device=tokens.device)

    def run():
        total = counts.sum()
        is_row = (node < counts[:, None]).flatten()
        place = (~is_row).sort(stable=True).indices[:max_rows]
        is_used = row < total
        batch, own = place // num_nodes, place % num_nodes
        cu_seqlens = torch.zeros(batch_size + 1, dtype=torch.int32, device=tokens.device)
        cu_seqlens[1:] = counts.cumsum(0).clamp(max=max_rows)
        return {
            "input_ids": torch.where(is_used, tokens.flatten()[place].clamp(min=0), 0),
            "positions": torch.where(is_used, values["seq_lens"][batch] + own, 0),
            "row_to_batch": torch.where(is_used, batch, -1).int(),
            "row_to_node": torch.where(is_used, own, -1).int(),
            "cu_seqlens": cu_seqlens,
            "num_rows": cu_seqlens[-1:],
        }

    return run
