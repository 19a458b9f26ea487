"""The state of a batch from step to step: tensors that stay where they are, so that a CUDA graph can name them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..config.eagle_config import EAGLEConfig
from ..models.protocol import DraftModel, TargetModel
from ..requests.sampling_params import Features
from .kv_pool import KVPool
from .row_sampling import RowSampling

# plain steps after which the draft reads what it missed
CATCH_UP_EVERY = 16


class Kept(NamedTuple):
    """Holds tokens [R, C] int64 that a draft has yet to read, or to read again, and the target's features [R, C, F]."""

    tokens: Tensor
    features: Tensor


class BatchState:
    """Holds R rows, each a request's or dead. A step reads rows 0 .. n - 1 and leaves them as the next one needs them.

    lengths       [R] int64       committed tokens in the target's KV; the root not counted
    roots         [R] int64       last committed token
    is_live       [R] int64       0: the row is computed in place, writes no key and never grows
    block_table   [R, max_pages]  int32, of both models' pools; -1: no page
    methods       [R] int64       the number of the row's method of drafting, if requests choose among several
    history       [R, L] int32    committed tokens, the root at place `lengths`; None if no drafter reads them
    draft_logits  [R, Vd]         what the draft says after the root
    draft_hidden  [R, H]          the draft's own state there; both None without a draft
    num_behind    [R] int64       committed tokens that the draft has not read for good, most of them of plain steps
    kept          these tokens, by the number that there is room for
    target_pool, draft_pool       keys and values; a request's pages have the same ids in both. None without a draft
    """

    def __init__(
        self, target: TargetModel, draft: DraftModel | None, config: EAGLEConfig, max_pages: int, num_pages: int
    ):
        device, num_rows = target.device, config.max_batch
        self.target_pool, self.draft_pool = (
            None if model is None else KVPool(model.kv_shape, num_pages, config.page_size, target.dtype, device)
            for model in (target, draft)
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_rows = num_rows
        self.lengths, self.roots, self.is_live = zeros(num_rows), zeros(num_rows), zeros(num_rows)
        self.block_table = zeros(num_rows, max_pages, dtype=torch.int32).fill_(-1)
        self.sampling = RowSampling(num_rows, target.vocab_size, device)
        self.methods = zeros(num_rows)
        self.history: Tensor | None = None
        self.draft_logits = None if draft is None else zeros(num_rows, draft.draft_vocab_size, dtype=target.dtype)
        self.num_behind = zeros(num_rows)
        self.kept: dict[int, Kept] = {}
        self.draft_hidden: Tensor | None = None  # until the first prompt tells how wide it is

    def set_draft(self, rows: Tensor, logits: Tensor, hidden: Tensor) -> None:
        """Writes the logits [R, Vd] and hidden states [R, H] of rows [R]."""
        if self.draft_hidden is None:
            self.draft_hidden = hidden.new_zeros(self.num_rows, hidden.shape[1])
        self.draft_logits[rows] = logits
        self.draft_hidden[rows] = hidden

    def begin(self, rows: Tensor, lengths: Tensor, roots: Tensor, block_table: Tensor, features: Features) -> None:
        """Lets rows [R] step whose prompts have been read, with their lengths [R], roots [R] and pages."""
        self.roots[rows], self.lengths[rows], self.block_table[rows] = roots, lengths, block_table
        if self.history is not None:
            self.history[rows, lengths] = roots.to(self.history.dtype)
        self.sampling.count_first(features, rows, roots)
        self.is_live.index_fill_(0, rows, 1)  # a number to a tensor's places would wait for the device

    def keep_history(self) -> None:
        """Makes room for the tokens of all rows."""
        if self.history is None:
            num_tokens = self.block_table.shape[1] * self.target_pool.page_size
            self.history = self.block_table.new_zeros(self.num_rows, num_tokens)

    def append_to_history(self, rows: slice, tokens: Tensor) -> None:
        """Appends a step's tokens [B, T], -1 padded, before `lengths` grow; the host finds out where requests end."""
        num_tokens = self.lengths[rows] + 1
        ops.append_output(self.history[rows], num_tokens, num_tokens, tokens)

    def make_room(self, count: int, feature_size: int) -> None:
        """Makes room for `count` kept tokens and features of each row."""
        if count not in self.kept:
            features = self.draft_logits.new_zeros(self.num_rows, count, feature_size)
            self.kept[count] = Kept(self.roots.new_zeros(self.num_rows, count), features)

    def keep(self, rows: slice, room: int, roots: Tensor, features: Tensor) -> None:
        """Keeps one more token of each live row, out of `roots` [B], with its features [B, 1, F]."""
        count, kept = self.num_behind[rows], self.kept[room]
        row, place = torch.arange(len(count), device=count.device), count.clamp(max=room - 1)
        kept.tokens[rows][row, place] = roots.clamp(min=0)
        kept.features[rows][row, place] = features[:, 0]
        count.add_(self.is_live[rows])

    def clear(self, row: int) -> None:
        """Marks the row as nobody's."""
        self.num_behind[row] = 0
        self.is_live[row] = 0
        self.lengths[row] = 0
        self.block_table[row] = -1

    def move(self, row: int, to: int) -> None:
        """Moves a row to place `to`; its old place is nobody's afterwards."""
        for tensor in self.tensors():
            tensor[to] = tensor[row]
        self.clear(row)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.lengths, self.roots, self.is_live, self.block_table, self.methods, self.history]
        held += [self.draft_logits, self.num_behind, self.draft_hidden]
        held += [tensor for kept in self.kept.values() for tensor in kept]
        return [tensor for tensor in held if tensor is not None] + self.sampling.tensors()
