"""Trees of explicit parents, as drafters without beams make them, and the tree of a root alone."""

from __future__ import annotations

from torch import Tensor

from ... import ops
from ..batch.batch import Batch
from ..config.eagle_config import EAGLEConfig


def tree_of(batch: Batch, tokens: Tensor, parents: Tensor, config: EAGLEConfig) -> ops.BuildTreeOutput:
    """Builds the tree of drafts [B, N - 1] from the nodes that are their parents, -1 where there is no draft."""
    sizes = {"num_verify_tokens": 1 + tokens.shape[1], "tree_mask_mode": config.tree_mask_mode}
    return ops.tree_from_parents(batch.roots, tokens, parents, batch.lengths, lengths_sum(batch, config), **sizes)


def lengths_sum(batch: Batch, config: EAGLEConfig) -> int | None:
    """Returns the sum of the rows' lengths for masks whose size depends on it, None for others."""
    return int(batch.lengths.sum()) if config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK else None


def root_only(roots: Tensor, lengths: Tensor) -> ops.BuildTreeOutput:
    """Builds trees without drafts, of roots [B] after lengths [B] committed tokens."""
    none = roots.new_empty(len(roots), 0)
    root_slot = roots.new_full((len(roots), 1), -1)
    return ops.build_tree(roots, root_slot, none, none, lengths, topk=1, spec_steps=1, num_verify_tokens=1)
