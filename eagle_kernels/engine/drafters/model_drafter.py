"""Drafts of a model, an EAGLE head, next-token modules or a small language model, as EAGLE-2's dynamic tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch.batch import Batch
from ..config.eagle_config import EAGLEConfig
from .protocol import Drafter, Proposal, Reader, lengths_sum


class ModelDrafter(Drafter):
    """Expands the best beams level by level, then keeps the best of all (EAGLE-2, arXiv 2406.16858, section 4)."""

    def __init__(self, reader: Reader, config: EAGLEConfig):
        super().__init__(config)
        self.reader, self.num_slots = reader, max(self.num_nodes, reader.num_slots)

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        tree, places = self._draft(batch)
        links = ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)])
        return Proposal(links, path_probs=lambda: places.path_probs(tree.top_scores_index))

    def _draft(self, batch: Batch) -> tuple[NamedTuple, Candidates]:
        """Returns what `build_tree_from_scores` makes of all candidates, and the candidates."""
        config, topk, offsets = self._config, self._config.topk, self.reader.model.draft_to_target
        levels, places = self.reader.levels(batch), Candidates(len(batch), config, batch.roots.device)
        level = ops.select_top_k_tokens(levels.logits, draft_to_target=offsets, topk=topk, level=0, out=places.level(0))
        for depth in range(1, config.num_steps):
            logits = levels.expand(depth, level.tokens, level.ancestors, level.hidden_rows)
            level = ops.select_top_k_tokens(
                logits, level.scores, level.ancestors, offsets, topk=topk, level=depth, out=places.level(depth)
            )
        levels.finish()
        tree = ops.build_tree_from_scores(
            batch.roots,
            places.scores,
            places.tokens,
            places.parent_slots,
            batch.lengths,
            lengths_sum(batch, config),
            topk=topk,
            spec_steps=config.num_steps,
            num_verify_tokens=config.num_verify_tokens,
            tree_mask_mode=config.tree_mask_mode,
        )
        return tree, places


class Candidates:
    """Holds all candidates of a step, level after level, as `build_tree_from_scores` reads them.

    scores, tokens  [B, C]  C = K + (S - 1) * K * K
    parent_slots    [B, P]  P = K * (S - 1) + 1, the root's -1 first
    """

    def __init__(self, size: int, config: EAGLEConfig, device: torch.device):
        self._topk, self._num_steps = config.topk, config.num_steps
        topk, levels = config.topk, config.num_steps - 1
        self.scores = torch.empty(size, topk + levels * topk * topk, dtype=torch.float32, device=device)
        self.tokens = torch.empty(self.scores.shape, dtype=torch.int64, device=device)
        self.parent_slots = torch.full((size, 1 + levels * topk), -1, device=device)

    def path_probs(self, kept: Tensor) -> Tensor:
        """Returns the probabilities [B, N - 1] of the kept candidates; see `Proposal`."""
        return self.scores.gather(1, kept).exp()

    def level(self, level: int) -> tuple[Tensor, ...]:
        """Returns the tensors that `select_top_k_tokens` writes for one level."""
        topk, size, device = self._topk, len(self.scores), self.scores.device
        begin = topk + (level - 1) * topk * topk if level else 0
        end = topk + level * topk * topk
        tokens, parents, hidden_rows, parent_slots = torch.empty(4, size, topk, dtype=torch.int64, device=device)
        scores = torch.empty(size, topk, dtype=torch.float32, device=device)
        ancestors = torch.empty(size, topk, -(-(level + 1) * topk // 64), dtype=torch.int64, device=device)
        if level < self._num_steps - 1:  # the last level's are not read
            parent_slots = self.parent_slots[:, 1 + level * topk : 1 + (level + 1) * topk]
        candidates = self.scores[:, begin:end], self.tokens[:, begin:end]
        return scores, tokens, parents, hidden_rows, parent_slots, *candidates, ancestors
