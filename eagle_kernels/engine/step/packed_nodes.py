"""Trees of different sizes: the drafts of a batch that are worth most, as rows of the target without gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ..batch.batch import Batch
from ..batch.kv_pool import KVPool, RaggedAttend
from ..drafters.protocol import Proposal


def prune(batch: Batch, proposal: Proposal, mean_nodes: int) -> Proposal:
    """Keeps the roots and the most probable drafts of the live rows, which have mean_nodes nodes in the mean."""
    tree, shape = proposal.tree, proposal.tree.retrieve_index.shape
    probs = torch.where(batch.is_live[:, None] > 0, proposal.path_probs(), torch.nan)
    most, max_rows = (mean_nodes - 1) * batch.is_live.sum(0, keepdim=True), mean_nodes * shape[0]
    nodes = tree.draft_tokens.view(shape), tree.tree_mask
    tokens, mask, num_nodes = ops.prune_trees(*nodes, probs, most, max_rows=max_rows)
    links = ops.tree_from_mask(mask, batch.lengths, num_verify_tokens=shape[1])
    pruned = tree._replace(tree_mask=mask, draft_tokens=tokens.flatten(), **links._asdict())
    return proposal._replace(tree=pruned, num_nodes=num_nodes, path_probs=None)


class PackedNodes:
    """Holds the nodes of pruned trees in R rows.

    tokens, positions  [1, R]  rows that no node has are behind the others, with token 0 and position 0
    """

    def __init__(self, batch: Batch, proposal: Proposal, positions: Tensor, max_rows: int):
        tree, self._batch, self._num_nodes = proposal.tree, batch, positions.shape[1]
        tokens = tree.draft_tokens.view(positions.shape)
        rows = ops.pack_verify_rows(tokens, proposal.num_nodes, positions, max_rows=max_rows)
        self.tokens, self.positions, self._bounds = rows.input_ids[None], rows.positions[None], rows.cu_seqlens
        # of all nodes, and one that stands for none
        node = rows.row_to_batch.to(torch.int64) * self._num_nodes + rows.row_to_node
        self._is_used = rows.row_to_node >= 0
        self._node = torch.where(self._is_used, node, positions.numel())
        self._words = tree.tree_mask.flatten(0, 1)

    def attend(self, pool: KVPool, slots: Tensor, deterministic: bool) -> RaggedAttend:
        """Returns the `attend` function of the rows; slots: [B, N] of the nodes."""
        batch, node = self._batch, self._node.clamp(max=slots.numel() - 1)
        slots = torch.where(self._is_used, slots.flatten()[node], -1)[None]
        sizes = (self._num_nodes, self._words[node])
        table, lengths = batch.block_table, batch.lengths
        return RaggedAttend(
            pool, table, lengths, self._bounds, slots, self.positions, *sizes, deterministic=deterministic
        )

    def unpack(self, values: Tensor) -> Tensor:
        """Returns values [R, X] of the rows as those of the nodes [B * N, X]; those of nodes without a row mean
        nothing."""
        num_nodes = self._batch.is_live.numel() * self._num_nodes
        unpacked = values.new_empty(num_nodes + 1, values.shape[1])
        return unpacked.index_copy_(0, self._node, values)[:num_nodes]
