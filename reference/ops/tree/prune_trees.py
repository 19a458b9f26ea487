"""Reference of prune_trees: all drafts in the order of their scores, then one node after another."""

import math
from typing import NamedTuple

import torch

from ...tree_mask import read_mask


class Output(NamedTuple):
    draft_tokens: torch.Tensor
    tree_mask: torch.Tensor
    num_nodes: torch.Tensor


def prune_trees(
    draft_tokens: torch.Tensor, tree_mask: torch.Tensor, scores: torch.Tensor, max_drafts: torch.Tensor | None = None,
    *, max_rows: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/prune_trees.py."""
    batch_size, num_nodes = draft_tokens.shape
    lengths = torch.zeros(batch_size, dtype=torch.int64, device=draft_tokens.device)
    visible = read_mask(tree_mask, lengths, num_nodes, "packed").tolist()
    values, tokens = scores.tolist(), draft_tokens.tolist()
    drafts = [(request, draft) for request in range(batch_size) for draft in range(num_nodes - 1)]
    drafts = [at for at in drafts if values[at[0]][at[1]] > -math.inf]  # which NaN is not, either
    drafts.sort(key=lambda at: -values[at[0]][at[1]])  # stable: equal scores in the order of nodes
    most = max_rows - batch_size
    if max_drafts is not None:
        most = min(max(max_drafts.item(), 0), most)
    best = set(drafts[:most])

    new_tokens = torch.full_like(draft_tokens, -1, dtype=torch.int64, device="cpu")
    new_visible = torch.zeros(batch_size, num_nodes, tree_mask.shape[-1] * 64, dtype=torch.int64, device="cpu")
    counts = []
    for request in range(batch_size):
        is_kept = [True] + [(request, draft) in best for draft in range(num_nodes - 1)]
        ancestors = [[j for j in range(node) if visible[request][node][j]] for node in range(num_nodes)]
        kept = [
            node
            for node in range(num_nodes)
            if node == 0 or is_kept[node] and 0 in ancestors[node] and all(is_kept[j] for j in ancestors[node])
        ]
        for place, node in enumerate(kept):
            new_tokens[request, place] = tokens[request][node]
            for other, seen in enumerate(kept[: place + 1]):
                new_visible[request, place, other] = int(visible[request][node][seen])
        counts.append(len(kept))
    bits = torch.ones(64, dtype=torch.int64, device="cpu") << torch.arange(64, device="cpu")
    words = (new_visible.unflatten(-1, (-1, 64)) * bits).sum(-1)
    device = draft_tokens.device
    return Output(new_tokens.to(device), words.to(device), torch.tensor(counts, dtype=torch.int32, device=device))
