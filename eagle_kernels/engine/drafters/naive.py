"""No drafts: a step verifies the root alone, which is plain decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import ops
from ..batch import Batch, Committed
from .protocol import Proposal


class NaiveDrafter:
    """FastDeploy's method of this name. `EAGLEConfig.naive_eagle()` is something else: one draft of an EAGLE head."""

    num_steps, num_nodes, num_slots = 0, 1, 1
    model = None
    reads_history = False

    def read_prompt(self, *_: Any) -> None:
        pass

    def propose(self, batch: Batch) -> Proposal:
        return Proposal(root_only(batch.roots, batch.lengths))

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        pass


def root_only(roots: Tensor, lengths: Tensor) -> ops.BuildTreeOutput:
    """A tree without drafts: [B] roots behind [B] committed tokens."""
    none = roots.new_empty(len(roots), 0)
    root_slot = roots.new_full((len(roots), 1), -1)
    return ops.build_tree(roots, root_slot, none, none, lengths, topk=1, spec_steps=1, num_verify_tokens=1)
