"""Drafts of a model: EAGLE-2's dynamic tree from an EAGLE head, a next-token module or a small language model.

Positions, for a request with n committed tokens t_0 .. t_{n-1} and root t_n (sampled, not yet in the target's KV): the
draft reads token t_i at position and slot i - token_shift, for EAGLE beside the feature of t_{i-1}. So it holds
n + 1 - token_shift rows, and level i >= 1 of the tree reads its tokens at position n + i - token_shift.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch import Batch, Committed
from ..batch_state import MEMORY, BatchState
from ..config import EAGLEConfig
from ..kv_pool import PrefillAttend, TreeAttend
from ..models.protocol import DraftModel
from .protocol import Proposal


class ModelDrafter:
    """The best `num_nodes - 1` of the tokens that the model finds likely, level by level.

    While plain steps go on it rests: they keep for it what it misses (`keep`), and it reads that when it is wanted
    again (`catch_up`).
    """

    reads_history = False

    def __init__(self, model: DraftModel, config: EAGLEConfig):
        self.model, self._config = model, config
        self.num_steps, self.num_nodes = config.num_steps, config.num_verify_tokens
        self._behind = 1 - model.token_shift
        levels = (config.num_steps - 1) * config.topk
        self.num_slots = max(self.num_nodes, self._behind + max(levels, config.num_steps + 1))

    def read_prompt(
        self,
        state: BatchState,
        row: int,
        block_table: Tensor,
        tokens: Tensor,
        features: Tensor | None,
        start: int,
        num_prompt: int,
    ) -> None:
        """Draft rows from `start` on, row i being token i + token_shift beside the feature of the token before it;
        without a shift the root's row comes last."""
        shift, stop = self.model.token_shift, start + len(tokens) - 1
        is_last = stop == num_prompt
        num_rows = stop - start + (self._behind if is_last else 0)
        if features is None:
            features = state.draft_logits.new_zeros(1, num_rows, 0)
        output = self.model.forward(
            tokens[None, shift : shift + num_rows],
            features,
            torch.arange(start, start + num_rows, device=tokens.device)[None],
            PrefillAttend(state.draft_pool, block_table, start, num_rows),
            from_target=True,
        )
        if is_last:
            state.set_draft(row, output.logits[0, -1], output.hidden[0, -1])

    def propose(self, batch: Batch) -> Proposal:
        """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the best beams level by level, then rerank."""
        tree, _ = self._draft(batch)
        return Proposal(ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)]))

    def _draft(self, batch: Batch) -> tuple[NamedTuple, Tensor]:
        """What `build_tree_from_scores` makes of all candidates, and their `parent_list` [B, P]."""
        config, topk, offsets = self._config, self._config.topk, self.model.draft_to_target
        size, rows, places = (
            len(batch),
            DraftRows(batch, self._behind),
            _Candidates(len(batch), config, batch.roots.device),
        )
        level = ops.select_top_k_tokens(
            batch.state.draft_logits[batch.rows], draft_to_target=offsets, topk=topk, level=0, out=places.level(0)
        )
        hidden = batch.state.draft_hidden[batch.rows][:, None].expand(-1, topk, -1)
        for depth in range(1, self._config.num_steps):
            output = self.model.forward(
                level.tokens,
                hidden,
                rows.positions[:, depth - 1 : depth].expand(size, topk),
                rows.level_attend(depth, topk, level.ancestors),
                from_target=False,
            )
            level = ops.select_top_k_tokens(
                output.logits.flatten(0, 1), level.scores, level.ancestors, offsets,
                topk=topk, level=depth, out=places.level(depth),
            )  # fmt: skip
            hidden = output.hidden.flatten(0, 1)[level.hidden_rows]
        # only the full-mask layout needs the host to know the lengths
        is_full = config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK
        tree = ops.build_tree_from_scores(
            batch.roots,
            places.scores,
            places.tokens,
            places.parent_slots,
            batch.lengths,
            int(batch.lengths.sum()) if is_full else None,
            topk=topk,
            spec_steps=config.num_steps,
            num_verify_tokens=config.num_verify_tokens,
            tree_mask_mode=config.tree_mask_mode,
        )
        return tree, places.parent_slots

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Reads the accepted path beside the target's true features; the rows of the tree are overwritten.

        Row d reads the token that follows path node d beside that node's feature; rows past the path are padding that
        only later rows see.
        """
        rows = DraftRows(batch, self._behind)
        output = self.model.forward(
            committed.tokens.clamp(min=0),
            features.flatten(0, 1)[committed.hidden_rows],
            rows.positions[:, : self.num_steps + 1],
            rows.path_attend(self.num_steps + 1),
            from_target=True,
        )
        state = batch.state
        torch.index_select(output.logits.flatten(0, 1), 0, committed.last_row, out=state.draft_logits[batch.rows])
        torch.index_select(output.hidden.flatten(0, 1), 0, committed.last_row, out=state.draft_hidden[batch.rows])

    def keep(self, batch: Batch, roots: Tensor, features: Tensor) -> None:
        """For `catch_up`: the new roots [B] of a plain step and, beside each, the feature [B, 1, F] of the token
        before it."""
        state = batch.state
        count = state.num_behind[batch.rows]
        row, place = torch.arange(len(count), device=count.device), count.clamp(max=MEMORY - 1)
        state.missed_tokens[batch.rows][row, place] = roots.clamp(min=0)
        state.missed_features[batch.rows][row, place] = features[:, 0]
        count.add_(batch.is_live)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept for it of the first `num_rows` rows.

        is_wanted: it drafts next. Else a plain step follows, and then it reads that one, so keys are enough by now.
        """
        model, pool, rows = self.model, state.draft_pool, slice(0, num_rows)
        count, table = state.num_behind[rows], state.block_table[rows]
        first = state.lengths[rows] + self._behind - count
        slots, positions = ops.find_slots(
            table, first, count=MEMORY, page_size=pool.page_size, max_length=model.max_length
        )
        # rows past what was missed are padding that only later rows see, in slots that hold nothing yet
        attend = TreeAttend(pool, table, first, slots, MEMORY, None, positions)
        missed = state.missed_tokens[rows], state.missed_features[rows], positions, attend
        if not is_wanted and hasattr(model, "store"):
            model.store(*missed)
            count.zero_()
            return
        output = model.forward(*missed, from_target=True)
        last = torch.arange(num_rows, device=first.device) * MEMORY + (count - 1).clamp(min=0)
        for kept, read in ((state.draft_logits, output.logits), (state.draft_hidden, output.hidden)):
            kept[rows].copy_(torch.where((count > 0)[:, None], read.flatten(0, 1)[last], kept[rows]))
        count.zero_()


class DraftRows:
    """Where the model's rows of a step go.

    positions  [B, M]  of the rows behind those that it holds
    """

    def __init__(self, batch: Batch, behind: int):
        self._pool, self._block_table = batch.state.draft_pool, batch.block_table
        self._slots, self.positions = batch.slots[:, behind:], batch.positions[:, behind:]
        self._lengths = batch.lengths + behind if behind else batch.lengths

    def level_attend(self, depth: int, topk: int, ancestors: Tensor) -> TreeAttend:
        """Of the beams of level `depth`, which see those of the levels before."""
        first, positions = (depth - 1) * topk, self.positions
        return TreeAttend(
            self._pool,
            self._block_table,
            self._lengths,
            self._slots[:, first : first + topk],
            first + topk,
            ancestors,
            positions[:, depth - 1 : depth].expand(-1, topk),
            positions[:, :depth, None].expand(-1, -1, topk),
        )

    def path_attend(self, num_rows: int) -> TreeAttend:
        """Of the accepted path, which is a chain."""
        return TreeAttend(
            self._pool,
            self._block_table,
            self._lengths,
            self._slots[:, :num_rows],
            num_rows,
            None,
            self.positions[:, :num_rows],
        )


class _Candidates:
    """What the levels of a draft propose, side by side as `build_tree_from_scores` reads it.

    scores, tokens  [B, C]  C = K + (S - 1) * K * K
    parent_slots    [B, P]  P = K * (S - 1) + 1, the root's -1 first
    """

    def __init__(self, size: int, config: EAGLEConfig, device: torch.device):
        self._size, self._topk, self._num_steps, self._device = size, config.topk, config.num_steps, device
        topk, levels = self._topk, self._num_steps - 1
        self.scores = torch.empty(size, topk + levels * topk * topk, device=device)
        self.tokens = torch.empty(self.scores.shape, dtype=torch.int64, device=device)
        self.parent_slots = torch.full((size, 1 + levels * topk), -1, device=device)

    def level(self, level: int) -> tuple[Tensor, ...]:
        """Where `select_top_k_tokens` writes one level."""
        topk = self._topk
        begin = topk + (level - 1) * topk * topk if level else 0
        end = topk + level * topk * topk
        beams = torch.empty(4, self._size, topk, dtype=torch.int64, device=self._device)
        scores = torch.empty(self._size, topk, device=self._device)
        num_words = -(-(level + 1) * topk // 64)
        ancestors = torch.empty(self._size, topk, num_words, dtype=torch.int64, device=self._device)
        tokens, parents, hidden_rows, parent_slots = beams
        if level < self._num_steps - 1:  # nobody reads the last level's
            parent_slots = self.parent_slots[:, 1 + level * topk : 1 + (level + 1) * topk]
        candidates = self.scores[:, begin:end], self.tokens[:, begin:end]
        return scores, tokens, parents, hidden_rows, parent_slots, *candidates, ancestors
