"""No drafts: a step verifies the root alone, which is plain decoding."""

from __future__ import annotations

from ..batch.batch import Batch
from ..config.eagle_config import EAGLEConfig
from .protocol import Proposal
from .trees import root_only, tree_of


class NaiveDrafter:
    """FastDeploy's method of this name. `EAGLEConfig.naive_eagle()` is something else: one draft of an EAGLE head.

    config: beside other methods, their configuration; trees are then as large as theirs, but empty below the root.
    """

    reader = None
    reads_history = False

    def __init__(self, config: EAGLEConfig | None = None):
        self._config = config
        self.num_steps, self.num_nodes = (0, 1) if config is None else (config.num_steps, config.num_verify_tokens)
        self.num_slots = self.num_nodes

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        if self._config is None:
            return Proposal(root_only(batch.roots, batch.lengths))
        none = batch.roots.new_full((len(batch), self.num_nodes - 1), -1)
        return Proposal(tree_of(batch, none, none, self._config))
