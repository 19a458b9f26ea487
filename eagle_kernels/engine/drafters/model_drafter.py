"""Drafts of a model, an EAGLE head, next-token modules or a small language model: the best ones, or drawn ones."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ..batch.state import Batch
from ..config.eagle_config import EAGLEConfig
from .protocol import Drafter, Proposal, Reader, lengths_sum, tree_of


class Candidates:
    """Holds all candidates of a step, level after level, as `build_tree_from_scores` reads them.
    scores, tokens: [B, C] with C = K + (S - 1) * K * K.
    parent_slots: [B, P] with P = K * (S - 1) + 1, the root's -1 first."""

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


class ModelDrafter(Drafter):
    """Expands the best beams level by level, then keeps the best of all (EAGLE-2, arXiv 2406.16858, section 4)."""

    def __init__(self, reader: Reader, config: EAGLEConfig):
        super().__init__(config)
        self.reader, self.num_slots = reader, max(self.num_nodes, reader.num_slots)

    def propose(self, batch: Batch) -> Proposal:
        tree, places = self._draft(batch)
        links = ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)])
        return Proposal(links, path_probs=lambda: places.path_probs(tree.top_scores_index))

    def _draft(self, batch: Batch) -> tuple[NamedTuple, Candidates]:
        """Returns what `build_tree_from_scores` makes of all candidates, and the candidates."""
        config, topk, offsets = self._config, self._config.topk, self.reader.model.draft_to_target
        levels, places = self.reader.levels(batch), Candidates(len(batch), config, batch.roots.device)
        level = ops.select_top_k_tokens(levels.logits, draft_to_target=offsets, topk=topk, level=0, out=places.level(0))
        for depth in range(1, config.num_steps):
            level = levels.select(depth, level, offsets, places.level(depth))
        levels.finish()
        candidates, total = (places.scores, places.tokens, places.parent_slots), lengths_sum(batch, config)
        sizes = {"topk": topk, "spec_steps": config.num_steps, "num_verify_tokens": config.num_verify_tokens}
        tree = ops.build_tree_from_scores(
            batch.roots, *candidates, batch.lengths, total, **sizes, tree_mask_mode=config.tree_mask_mode
        )
        return tree, places


class SampledDrafter(ModelDrafter):
    """`topk` children of the root, drawn without replacement, and a chain of draws below each.

    The shape of the tree is fixed. Nodes are numbered level by level; a smaller `num_nodes` leaves out the last ones.

    Draws are keyed by position and beam, and later steps use the same keys again. With its root at position n, a step
    draws level d (0: the root's children) for position n + d + 1. If it accepts a drafts, the next root is at
    n + a + 1, and its children have the keys of level a + 1, beam 0, of the step before; likewise the levels below.
    The second draws are nevertheless independent of everything that the first step revealed: its walk ended at a node
    of depth a, so it read that node's children, drawn at level a, and nothing of the levels below them.

    So only the tokens that a walk reads may reveal draws, neither the tree's shape nor what a step leaves to later
    ones, such as the draft's cache. A dynamic tree reveals all draws by its shape. It would not keep the target's
    distribution unless every draw of a text had a key of its own. Tested by op_tests/engine/test_noise_keys.py (keys,
    shape) and test_draft_state.py (cache).
    """

    def __init__(self, reader: Reader, config: EAGLEConfig, device: torch.device):
        super().__init__(reader, config)
        topk = self._topk = config.topk
        node = torch.arange(1, self.num_nodes, device=device)
        self._parents = (node - topk).clamp(min=0)[None]
        # [K, W] for each depth: a beam sees its own slots of the levels before
        self._ancestors = [_own_slots(topk, depth).to(device) for depth in range(1, self.num_steps)]

    def propose(self, batch: Batch) -> Proposal:
        """Draws the tree level by level."""
        topk, size = self._topk, len(batch)
        temperature, levels = batch.numbers("temperature"), self.reader.levels(batch)
        logits, offsets = levels.logits, self.reader.model.draft_to_target
        beam = torch.arange(topk, device=logits.device).repeat(size)
        seeds, warm = batch.seeds.repeat_interleave(topk), temperature.repeat_interleave(topk)
        tokens = ops.sample_children(
            logits, batch.lengths + 1, batch.seeds, temperature, d2t=offsets, num_children=topk
        ).tokens
        drawn, read = [tokens], [logits[:, None]]
        for depth in range(1, self.num_steps):
            ancestors = self._ancestors[depth - 1].repeat(size, 1, 1)
            below = levels.expand(depth, tokens.clamp(min=0), ancestors)
            position = (batch.lengths + 1 + depth).repeat_interleave(topk)
            tokens = ops.sample_children(below, position, seeds, warm, beam, offsets, num_children=1).tokens
            tokens = tokens.view(size, topk)
            drawn.append(tokens)
            read.append(below.view(size, topk, -1))
        levels.finish()
        draft_logits = logits.new_zeros(size, self.num_nodes, logits.shape[-1])
        rows_read = torch.cat(read, dim=1)[:, : self.num_nodes]
        draft_logits[:, : rows_read.shape[1]] = rows_read
        tokens = torch.cat(drawn, dim=1)[:, : self.num_nodes - 1].contiguous()
        tree = tree_of(batch, tokens, self._parents.repeat(size, 1), self._config)
        return Proposal(
            tree, draft_logits.flatten(0, 1), offsets, lambda: self._path_probs(tokens, draft_logits, offsets, warm)
        )

    def _path_probs(self, tokens: Tensor, draft_logits: Tensor, offsets: Tensor | None, temperature: Tensor) -> Tensor:
        """See `Proposal`: softmax at the request's temperature (greedy: at 1), without what the draws took from it."""
        topk, vocab = self._topk, draft_logits.shape[-1]
        temperature = torch.where(temperature > 0, temperature, 1.0)[::topk, None, None]
        parents = self._parents[..., None].expand(len(tokens), -1, vocab)
        probs = torch.softmax(draft_logits.gather(1, parents).float() / temperature, dim=-1)
        ids = torch.arange(vocab, device=tokens.device) + (0 if offsets is None else offsets)
        probs = torch.where(ids == tokens[..., None], probs, 0).sum(-1)
        for first in range(topk, tokens.shape[1], topk):
            last = min(first + topk, tokens.shape[1])
            probs[:, first:last] *= probs[:, first - topk : last - topk]
        return probs


def _own_slots(topk: int, depth: int) -> Tensor:
    """Returns packed words [K, W], by which beam j sees slots j, K + j, 2 K + j, .. of `depth` levels."""
    own = torch.eye(topk, dtype=torch.int64, device="cpu").repeat(1, depth)
    bits = pad(own, (0, -depth * topk % 64)).view(topk, -1, 64)
    return (bits << torch.arange(64, device="cpu")).sum(-1)
