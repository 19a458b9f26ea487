"""What a step asks of a drafter and of the reader of its model, and the trees of drafters that name parents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ..batch.state import Batch, BatchState, Committed
from ..config.eagle_config import EAGLEConfig
from ..models.protocol import DraftModel


class Proposal(NamedTuple):
    """Holds a tree of N = `num_nodes` nodes for each row; nodes without a link to them are padding.

    draft_logits     [B * N, Vd]  what the children of each node were drawn from, at the request's temperature and
                                  without replacement; None: drafts were chosen, not drawn. A tree of drawn drafts has
                                  the same shape in all steps, for the reason that `SampledDrafter` gives
    draft_to_target  [Vd]         the offsets of `DraftModel`, with draft_logits
    path_probs       () -> [B, N - 1] fp32: the drafter's probability of each draft with all above it, as EAGLE-2
                                  scores it, NaN where unknown. Computed on demand, within the step; None: unknown
    num_nodes        [B]          how many nodes of each row are verified, from the first on; None: all
    learn            (committed)  takes what was accepted, within the step; None: the drafter does not ask
    """

    tree: ops.BuildTreeOutput
    draft_logits: Tensor | None = None
    draft_to_target: Tensor | None = None
    path_probs: Callable[[], Tensor] | None = None
    num_nodes: Tensor | None = None
    learn: Callable[[Committed], None] | None = None


class Drafts(NamedTuple):
    """Holds M drafts of a drafter for each row, parents before their children, -1 padded."""

    tokens: Tensor  # [B, M] int64
    parents: Tensor  # [B, M] int64: nodes, 0 the root
    probs: Tensor  # [B, M] fp32: of each once all above it are accepted; drafts where it is not above 0 do not count


class Drafter:
    """Proposes a chain or a tree for each row of a batch. It finds accepted tokens in `BatchState.history`, or its
    `reader` has read them. `propose` is part of a step, and so are the reader's methods except `read_prompts`: they
    never wait for the device, allocate nothing that depends on data, and may be captured in a CUDA graph.

    num_steps      depth of the deepest draft, and so the most drafts that a step accepts
    num_nodes      nodes that a step verifies, root included; 1: no drafts
    num_slots      slots after a row's committed tokens that drafting and verification may write, in either pool
    reader         reads the text with the drafter's model; None: there is no model
    reads_history  whether it reads `BatchState.history`
    """

    reader: Reader | None = None
    reads_history = False

    def __init__(self, config: EAGLEConfig):
        self._config = config
        self.num_steps, self.num_nodes = config.num_steps, config.num_verify_tokens
        self.num_slots = self.num_nodes

    def propose(self, batch: Batch) -> Proposal:
        """Returns a tree for each row."""
        raise NotImplementedError

    def drafts(self, batch: Batch) -> Drafts:
        """Returns its drafts for a tree that it shares with others; the trees that it proposes have packed masks."""
        proposal = self.propose(batch)
        tree, num_nodes = proposal.tree, proposal.tree.retrieve_index.shape[1]
        node = torch.arange(num_nodes, device=tree.tree_mask.device)
        is_above = ops.unpack_tree_mask(tree.tree_mask, num_verify_tokens=num_nodes) & (node < node[:, None])
        parents = torch.where(is_above, node, -1).amax(-1)[:, 1:]
        paths = pad(proposal.path_probs(), (1, 0), value=1.0)
        probs = paths[:, 1:] / paths.gather(1, parents.clamp(min=0))
        return Drafts(tree.draft_tokens.view(-1, num_nodes)[:, 1:], parents, probs)

    @property
    def overshoot(self) -> int:
        """The slots that a request may need past its last token: for what its last step brings beyond it, for a step
        that runs before the host knows of the end, and for what steps write after the committed tokens."""
        return 2 * (self.num_steps + 1) + self.num_slots


class PromptPart(NamedTuple):
    """Holds P tokens of a prompt, from token `start` on. The prompt's first `num_shared` were read by another
    request."""

    row: int
    block_table: Tensor  # [1, max_pages]: the row's, which joins the batch only when its prompt has been read
    tokens: Tensor  # [P + 1]: the part and the token after it; after the last part, that is the row's root
    features: Tensor | None  # [1, P, F]: the target's features of the P tokens; None if the model reads none
    start: int
    num_shared: int
    is_last: bool


class Reader(Protocol):
    """Reads every committed token into a pool of its own, with a draft model, and computes levels of drafts. All
    drafters with this model share it. It pauses during steps without its drafts, which keep what it misses
    (`BatchState.keep`), and it reads that before it drafts again (`catch_up`). `read_prompts` forgets the rows'
    previous requests."""

    model: DraftModel
    ahead: int  # tokens after that of a row on which the row's keys depend
    num_slots: int  # slots after a row's committed tokens that it may write
    num_kept: int  # most tokens of a row, with the target's features, that are kept for it between steps

    def read_prompts(self, state: BatchState, parts: Sequence[PromptPart]) -> None:
        """Reads the next part of each row's prompt; if it fails, it may be called again with any of them."""

    def levels(self, batch: Batch) -> Levels:
        """Starts the drafts of a step, after the rows' roots."""

    def observe(self, batch: Batch, committed: Committed, features: Tensor) -> None:
        """Takes what was accepted, and the target's features [B, N, F] of all nodes."""

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """Reads what was kept of the first `num_rows` rows. If its drafts are not wanted next, a step follows in which
        it pauses, which it will read before it drafts."""


class Levels(Protocol):
    """Computes the levels of a step's drafts; logits [B, Vd] are those after the roots."""

    logits: Tensor

    def expand(self, depth: int, tokens: Tensor, ancestors: Tensor | None, parents: Tensor | None = None) -> Tensor:
        """Returns logits [B * K, Vd] after the drafts of level depth - 1, for depth = 1, 2, ..
        tokens: [B, K], these drafts.
        ancestors: [B * K, W], packed words of the slots that each of them sees, of all levels so far, K a level.
        parents: [B, K], flat rows of the level before that they follow; None: each follows the row in its place."""

    def select(
        self, depth: int, above: ops.SelectTopKTokensOutput, offsets: Tensor | None, out: tuple[Tensor, ...]
    ) -> ops.SelectTopKTokensOutput:
        """Drafts level `depth` after the beams of level depth - 1, into `out`. offsets: `draft_to_target`."""
        logits = self.expand(depth, above.tokens, above.ancestors, above.hidden_rows)
        sizes = {"topk": above.tokens.shape[1], "level": depth}
        return ops.select_top_k_tokens(logits, above.scores, above.ancestors, offsets, **sizes, out=out)

    def finish(self) -> None:
        """Reads what must be read although no more levels are drafted; by default nothing."""


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


def copy_probs(
    drafts: Iterable[tuple[int, int]], known: Iterable[tuple[int, int]], probs: Sequence[float],
    path: Iterable[int] = (),
) -> list[float]:  # fmt: skip
    """Returns the path probabilities of a row's drafts, each a token and its parent, from those of a tree of `known`
    nodes 1, 2, .., in which the drafts lie below the node that `path` leads to."""
    nodes = {(parent, token): node for node, (token, parent) in enumerate(known, start=1)}
    reached: list[int | None] = [0]
    for token in path:
        reached = [nodes.get((reached[0], token))]
    whole, copied = probs[reached[0] - 1] if reached[0] else 1.0, []
    for token, parent in drafts:
        reached.append(nodes.get((reached[parent], token)) if parent >= 0 else None)
        copied.append(probs[reached[-1] - 1] / whole if reached[-1] else math.nan)
    return copied
