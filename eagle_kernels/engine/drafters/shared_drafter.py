"""Several drafters for each row of a batch, which share the nodes of its tree by what each of them brings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ...ops.draft.share_drafts import Output as SharedDrafts
from ..batch.state import Batch, Committed
from ..config.eagle_config import EAGLEConfig
from .protocol import Drafter, Proposal, Reader, tree_of

# Drafts that count as accepted as often as they promise, before any is measured; what has been measured counts for less
# with each step. So a drafter whose drafts get no nodes, and are not measured, is trusted again after a while.
PRIOR, FORGETTING = 4.0, 1 / 128


class SharedDrafter(Drafter):
    """Lets all drafters draft for all rows. A row's tree has the drafts that are likeliest to be accepted, whoever made
    them (`ops.share_drafts`): a draft that several made is one node, and what the text says may follow what the model
    says. What the drafters promise is compared with what was accepted (`Record`).
    parts: one drafter for each method, whose trees have packed masks and the same number of nodes."""

    def __init__(self, config: EAGLEConfig, reader: Reader | None, parts: Sequence[Drafter], device: torch.device):
        super().__init__(config)
        self.reader, self.parts, self.record = reader, parts, Record(len(parts), self.num_steps, device)
        self.num_slots = max(self.num_nodes, *(part.num_slots for part in parts))
        self.reads_history = any(part.reads_history for part in parts)

    def propose(self, batch: Batch) -> Proposal:
        tokens, parents, probs = (torch.stack(each, 1) for each in zip(*(part.drafts(batch) for part in self.parts)))
        sizes = {"num_speculative_tokens": self.num_nodes - 1}
        shared = ops.share_drafts(tokens, parents, probs, self.record.factors, **sizes)
        tree = tree_of(batch, shared.tokens, shared.parents, self._config)
        depths = tree.positions.view(-1, self.num_nodes)[:, 1:] - batch.lengths[:, None]
        return Proposal(
            tree, path_probs=lambda: shared.scores,
            learn=lambda committed: self.record.observe(shared, depths, committed),
        )  # fmt: skip


class Record:
    """Measures how far each drafter's probabilities can be trusted: of P drafters at T depths, how many drafts were
    accepted, and how many would have been by what the drafter said of them. Both in tensors that stay where they are.
    """

    def __init__(self, num_drafters: int, num_steps: int, device: torch.device):
        shape, options = (num_drafters, num_steps), {"dtype": torch.float32, "device": device}
        self.accepted, self.promised = (torch.full(shape, PRIOR, **options) for _ in range(2))

    @property
    def factors(self) -> Tensor:
        """Returns what the drafters' probabilities are multiplied by, [P, T]."""
        return self.accepted / self.promised

    def observe(self, shared: SharedDrafts, depths: Tensor, committed: Committed) -> None:
        """Counts the drafts of a step, at depths [B, K], whose place in the text is known by now. Whether they were
        verified, or were left out for others' drafts by `prune_trees`, makes no difference."""
        num_drafters, num_steps = self.accepted.shape
        came = committed.tokens.gather(1, (depths - 1).clamp(0, committed.tokens.shape[1] - 1))
        is_draft = shared.parents >= 0
        is_right = torch.cat([torch.ones_like(is_draft[:, :1]), is_draft & (shared.tokens == came)], dim=1)
        above = torch.cat([torch.zeros_like(depths[:, :1]), shared.parents.clamp(min=0)], dim=1)
        parents = above[:, 1:]
        for _ in range((num_steps - 1).bit_length()):  # pointer doubling: all above it are right as well
            is_right = is_right & is_right.gather(1, above)
            above = above.gather(1, above)
        is_tried = is_draft & (came >= 0) & is_right.gather(1, parents)
        is_accepted = (is_tried & is_right[:, 1:])[:, None] & (shared.probs > 0)
        values = torch.cat([is_accepted.float(), shared.probs * is_tried[:, None]], dim=1)
        is_depth = (depths[..., None] == torch.arange(1, num_steps + 1, device=depths.device)).float()
        accepted, promised = torch.einsum("bpk,bkt->pt", values, is_depth).split(num_drafters)
        for total, new in ((self.accepted, accepted), (self.promised, promised)):
            total.mul_(1 - FORGETTING).add_(new).add_(FORGETTING * PRIOR)
