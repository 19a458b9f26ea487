"""Trees of explicit parents, as drafters without beams make them, and the tree that is its root."""

from __future__ import annotations

from torch import Tensor

from ... import ops
from ..batch.batch import Batch
from ..config.eagle_config import EAGLEConfig


def tree_of(batch: Batch, tokens: Tensor, parents: Tensor, config: EAGLEConfig) -> ops.BuildTreeOutput:
    """The tree of drafts [B, N - 1] with the nodes that are their parents, -1 where there is no draft."""
    is_full = config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK
    return ops.tree_from_parents(
        batch.roots,
        tokens,
        parents,
        batch.lengths,
        **({"seq_lens_sum": int(batch.lengths.sum())} if is_full else {}),
        num_verify_tokens=1 + tokens.shape[1],
        tree_mask_mode=config.tree_mask_mode,
    )


def root_only(roots: Tensor, lengths: Tensor) -> ops.BuildTreeOutput:
    """A tree without drafts: [B] roots behind [B] committed tokens."""
    none = roots.new_empty(len(roots), 0)
    root_slot = roots.new_full((len(roots), 1), -1)
    return ops.build_tree(roots, root_slot, none, none, lengths, topk=1, spec_steps=1, num_verify_tokens=1)
