"""Rows of the target that are no whole batch: the drafts that are worth most, and parts of prompts beside them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch.kv_pool import RaggedAttend
from ..batch.state import Batch, BatchState
from ..drafters.protocol import Proposal

# of how many prompts a step reads a part at most
MOST_PARTS = 8


def prune(batch: Batch, proposal: Proposal, mean_nodes: int) -> Proposal:
    """Keeps the roots and the most probable drafts of the live rows, which have mean_nodes nodes in the mean."""
    tree, shape = proposal.tree, proposal.tree.retrieve_index.shape
    probs = torch.where(batch.is_live[:, None] > 0, proposal.path_probs(), torch.nan)
    most = (mean_nodes - 1) * batch.is_live.sum(0, keepdim=True)
    tokens, mask, num_nodes = ops.prune_trees(
        tree.draft_tokens.view(shape), tree.tree_mask, probs, most, max_rows=mean_nodes * shape[0]
    )
    links = ops.tree_from_mask(mask, batch.lengths, num_verify_tokens=shape[1])
    pruned = tree._replace(tree_mask=mask, draft_tokens=tokens.flatten(), **links._asdict())
    return proposal._replace(tree=pruned, num_nodes=num_nodes, path_probs=None)


class PackedNodes:
    """Holds the nodes of pruned trees in R = `num_rows` rows.
    tokens, positions: [1, R]. Rows that no node has come after the others, with token 0 and position 0.
    attend: of the rows."""

    def __init__(self, batch: Batch, proposal: Proposal, positions: Tensor, num_rows: int, deterministic: bool):
        tokens, mask, shape = proposal.tree.draft_tokens, proposal.tree.tree_mask, positions.shape
        rows = ops.pack_verify_rows(tokens.view(shape), proposal.num_nodes, positions, max_rows=num_rows)
        self.tokens, self.positions, self._num_nodes = rows.input_ids[None], rows.positions[None], shape.numel()
        is_used = rows.row_to_node >= 0
        node = rows.row_to_batch.to(torch.int64) * shape[1] + rows.row_to_node
        # of all nodes, and one that stands for none
        self._node = torch.where(is_used, node, self._num_nodes)
        some = self._node.clamp(max=self._num_nodes - 1)
        slots = torch.where(is_used, batch.slots[:, : shape[1]].flatten()[some], -1)[None]
        given = rows.cu_seqlens, slots, self.positions, shape[1], mask.flatten(0, 1)[some]
        pool, lengths = batch.state.target_pool, batch.lengths
        self.attend = RaggedAttend(pool, batch.block_table, lengths, *given, deterministic=deterministic)

    def unpack(self, values: Tensor) -> Tensor:
        """Returns values [R, X] of the rows as those of the nodes [B * N, X]; nodes without a row have any."""
        unpacked = values.new_empty(self._num_nodes + 1, values.shape[1])
        return unpacked.index_copy_(0, self._node, values)[: self._num_nodes]


class Part(NamedTuple):
    """Holds a part of a prompt: `size` tokens from `start` on, in the request's pages. `text` has these tokens and the
    one after them, which the last part lacks."""

    text: list[int]
    start: int
    size: int
    pages: list[int]


class PromptOutput(NamedTuple):
    """Holds what the target makes of the parts: logits [R, V] after each, features [1, P, F] or None."""

    logits: Tensor
    features: Tensor | None


class PromptRows:
    """Holds P rows for up to R parts, one part after another, in tensors that stay where they are. Reading takes
    arithmetic and a step of few rows takes the bandwidth of the weights, so both together take hardly longer than the
    longer one. P is fixed, so that a step with these rows is a CUDA graph like any other.

    tokens, positions  [P]             of the rows; rows past the last part have position 0 and write no key
    texts              [P + R]         the parts' texts, one after another
    starts, lasts      [R]             where each part begins in its prompt, and the row of its last token
    bounds             [R + 1]         the rows where each part begins and ends
    held               all of these; zeros are no part
    """

    def __init__(self, num_tokens: int, state: BatchState):
        self.num_tokens, max_pages = num_tokens, state.block_table.shape[1]
        sizes = (num_tokens, num_tokens, num_tokens, num_tokens + MOST_PARTS, MOST_PARTS, MOST_PARTS, MOST_PARTS + 1)
        self.held = torch.zeros(sum(sizes) + MOST_PARTS * max_pages, dtype=torch.int64, device=state.lengths.device)
        *self._fields, tables = self.held.split([*sizes, MOST_PARTS * max_pages])
        self.tokens, self.positions, self._part_of, self.texts, self.starts, self.lasts, self.bounds = self._fields
        self._tables = tables.view(MOST_PARTS, max_pages)
        self._pool = state.target_pool

    def fill(self, parts: Sequence[Part]) -> None:
        """Writes the parts, at most R with at most P tokens; the host does not wait for the device."""
        options = {"dtype": torch.int64, "device": "cpu"}
        staged = torch.zeros(self.held.shape, **options, pin_memory=self.held.is_cuda)
        *fields, tables = staged.split([*(len(field) for field in self._fields), self._tables.numel()])
        stops = list(itertools.accumulate(part.size for part in parts))
        values = (
            [token for part in parts for token in part.text[: part.size]],
            [part.start + row for part in parts for row in range(part.size)],
            [number for number, part in enumerate(parts) for _ in range(part.size)],
            [token for part in parts for token in part.text], [part.start for part in parts],
            [stop - 1 for stop in stops], [0, *stops] + [stops[-1]] * (MOST_PARTS - len(parts)),
        )  # fmt: skip
        for field, numbers in zip(fields, values):
            field[: len(numbers)] = torch.tensor(numbers, **options)
        for table, part in zip(tables.view(self._tables.shape), parts):
            table[: len(part.pages)] = torch.tensor(part.pages, **options)
        self.held.copy_(staged, non_blocking=True)

    def attend(self) -> RaggedAttend:
        """Returns the `attend` function of these rows."""
        page_size = self._pool.page_size
        pages = self._tables[self._part_of, self.positions // page_size]
        is_read = torch.arange(self.num_tokens, device=pages.device) < self.bounds[-1]
        slots = torch.where(is_read, pages * page_size + self.positions % page_size, -1)
        rows = slots[None], self.positions[None]
        return RaggedAttend(self._pool, self._tables, self.starts, self.bounds, *rows, self.num_tokens)
