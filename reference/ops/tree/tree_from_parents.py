"""Reference of tree_from_parents: one node after another, each behind its parent."""

import torch

from ...tree_mask import write_mask
from .build_tree import Output, nodes_of


def tree_from_parents(
    verified_id: torch.Tensor, draft_tokens: torch.Tensor, parents: torch.Tensor, seq_lens: torch.Tensor,
    seq_lens_sum: int | None = None,
    *, num_verify_tokens: int, tree_mask_mode: str = "packed", prefix_is_set: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/tree_from_parents.py. `prefix_is_set`, `out`: see build_tree."""
    device, batch_size, num_nodes = seq_lens.device, len(seq_lens), num_verify_tokens
    visible = torch.eye(num_nodes, dtype=torch.bool, device="cpu").repeat(batch_size, 1, 1)
    depth = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device="cpu")
    parent_of = [[-1] * num_nodes for _ in range(batch_size)]  # of linked nodes
    tokens = verified_id.to(torch.int64)[:, None].repeat(1, num_nodes)
    drafts, named = draft_tokens.tolist(), parents.tolist()
    for request in range(batch_size):
        linked = {0}
        for node in range(1, num_nodes):
            parent = named[request][node - 1]
            # whoever is linked already precedes this node
            if parent not in linked or drafts[request][node - 1] < 0:
                continue
            linked.add(node)
            tokens[request, node] = drafts[request][node - 1]
            visible[request, node] |= visible[request, parent]
            depth[request, node] = depth[request, parent] + 1
            parent_of[request][node] = parent
    mask = write_mask(visible.to(device), seq_lens.to(torch.int64), tree_mask_mode, seq_lens_sum, out and out.tree_mask)
    return Output(mask, *nodes_of(parent_of, depth, seq_lens), tokens.flatten())
