"""Reference of build_tree: one node after another, as the papers tell it."""

from typing import NamedTuple

import torch

from ...tree import links_of
from ...tree_mask import write_mask


class Output(NamedTuple):
    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


def build_tree(
    verified_id: torch.Tensor, parent_list: torch.Tensor, top_scores_index: torch.Tensor, draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor, seq_lens_sum: int | None = None,
    *, topk: int, spec_steps: int, num_verify_tokens: int, tree_mask_mode: str = "packed", prefix_is_set: bool = False,
    any_order: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/build_tree.py. The prefix of `prefix_is_set` is True; `out` is read, not written."""
    device, batch_size, num_nodes = seq_lens.device, len(seq_lens), num_verify_tokens
    visible = torch.zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool, device="cpu")
    depth = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device="cpu")
    # a candidate id that does not fit 31 bits names nobody
    slots, kept = (ids.masked_fill(ids >= 2**31 - 1, -1).tolist() for ids in (parent_list, top_scores_index))
    visible[:, :, 0] = True
    parents = [[_parent(node, *row, topk, any_order) for node in range(num_nodes)] for row in zip(slots, kept)]
    for request, parent_of in enumerate(parents):
        for node in range(num_nodes):
            hop, steps = node, 0
            while hop > 0 and not (any_order and steps == spec_steps):
                visible[request, node, hop] = True
                hop, steps = parent_of[hop], steps + 1
            # on a way that ends at a missing parent the last step leads nowhere: in any order it counts all the same
            depth[request, node] = steps if hop == 0 or any_order else steps - 1
    tokens = torch.cat([verified_id[:, None], draft_tokens], dim=1).to(torch.int64)
    mask = write_mask(visible.to(device), seq_lens.to(torch.int64), tree_mask_mode, seq_lens_sum, out and out.tree_mask)
    return Output(mask, *nodes_of(parents, depth, seq_lens), tokens.flatten())


def nodes_of(parents: list[list[int]], depth: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns positions, row numbers and links of nodes with these parents and depths [B, N]."""
    (batch_size, num_nodes), device = depth.shape, seq_lens.device
    positions = (seq_lens.to(torch.int64)[:, None] + depth.to(device)).flatten()
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    return positions, retrieve_index, *(links.to(device) for links in links_of(parents, num_nodes))


def _parent(node: int, slots: list[int], kept: list[int], topk: int, any_order: bool) -> int:
    """The parent's node index, -1 for the root and for nodes whose parent is missing or does not precede them."""
    if node == 0 or kept[node - 1] < 0:
        return -1
    slot = kept[node - 1] // topk
    if slot == 0:
        return 0
    if slot >= len(slots) or slots[slot] < 0 or slots[slot] not in kept:
        return -1
    parent = kept.index(slots[slot]) + 1
    return parent if parent < node or any_order else -1
