"""One step of a batch: a drafter proposes trees, the target verifies them, and the accepted paths are kept.

A step never waits for the device and changes its batch in place, so it can be captured in a CUDA graph as it is. The
exception is steps with masks of layout `full_mask`, whose size the host must know.

Let a request have n committed tokens t_0 .. t_{n-1} and the root t_n, which is sampled but not yet in the target's KV.
Then the target reads a node of depth d at position n + d.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch.kv_pool import DecodeAttend, JointAttend, RaggedAttend, TreeAttend
from ..batch.state import Batch, BatchState, Committed
from ..config.eagle_config import EAGLEConfig
from ..drafters.draft_reader import DraftReader
from ..drafters.protocol import Drafter, Proposal, root_only
from ..models.protocol import ModelError, TargetModel, takes_rows
from ..models.running import run_target
from ..requests.sampling_params import Features
from .packed_rows import PackedNodes, PromptOutput, PromptRows, prune
from .phases import PhaseTimer
from .verification import Scores, Verifier, links_of, score, without_early_ends


class StepResult(NamedTuple):
    """Holds the tensors that the host reads after a step; the values of dead rows are meaningless.
    Both kinds of log-probabilities are None if no request asked for either; likewise the most likely tokens."""

    tokens: Tensor  # [B, S + 1] int64: accepted drafts and the bonus token, padded with -1
    logprobs: Tensor | None  # [B, S + 1] fp32: of these among the tokens that the filters left
    raw_logprobs: Tensor | None  # [B, S + 1] fp32: of these by the logits as given
    top_ids: Tensor | None = None  # [B, S + 1, K]: the most likely tokens in their places
    top_logprobs: Tensor | None = None  # [B, S + 1, K]


# what a step brings, and what its pass of the target made of parts of prompts
Stepped = tuple[StepResult, PromptOutput | None]


class Verified(NamedTuple):
    """Holds a step's trees and the verdict on them, before the batch changes: the argument of `on_tree`.

    Attributes:
        batch, features: The rows in the step, and the parts of verification that they need.
        proposal: The trees: tokens, links, mask and positions.
        logits: [B * N, V]. The target's logits at all nodes; those past `proposal.num_nodes` are meaningless.
        committed: What verification accepted and drew.
    """

    batch: Batch
    proposal: Proposal
    logits: Tensor
    features: Features
    committed: Committed


class Stepper:
    """Carries out the step of one configuration: its drafter proposes trees, and the target verifies them.

    readers        of the plan's draft models; those with which the drafter does not draft rest, and catch up later
    keeps_history  whether committed tokens are written to `BatchState.history`, since some drafter of the plan reads it
    on_tree        called in every step, which is then not captured; it may wait for the device, but must change nothing
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, config: EAGLEConfig, readers: Sequence[DraftReader] = (),
        keeps_history: bool = False, on_tree: Callable[[Verified], None] | None = None,
    ):  # fmt: skip
        self.target, self.drafter, self.config, self.on_tree = target, drafter, config, on_tree
        self.keeps_history = keeps_history
        self.own = next((each for each in readers if each.reader is drafter.reader), None)
        self.resting = [each for each in readers if each is not self.own]
        self._models = [each.reader.model for each in readers]
        self.aux_layers = tuple(layer for model in self._models for layer in model.aux_layers)
        self.num_steps, self.num_nodes = drafter.num_steps, drafter.num_nodes
        mean = config.mean_draft_tokens
        # of a request in the mean; those of a batch are shared out by what they are worth if that is less
        self.mean_nodes = self.num_nodes if mean is None else min(mean, self.num_nodes)
        if self.mean_nodes < self.num_nodes and not takes_rows(target):
            rule = "be None for a target whose forward does not take last_rows: trees of different sizes are one batch"
            raise ModelError(f"EAGLEInference: mean_draft_tokens must {rule}")
        self._verifier = Verifier(config, self.num_steps, target.device)

    @property
    def can_be_captured(self) -> bool:
        """Returns whether a step can be captured in a CUDA graph: nothing in it waits for the device."""
        if not all(getattr(model, "can_be_captured", True) for model in (self.target, *self._models)):
            return False
        return self.num_nodes == 1 or self.config.tree_mask_mode != ops.TreeMaskMode.FULL_MASK

    @property
    def reads_several(self) -> bool:
        """Returns whether the target reads prompts of several requests at once, and beside the rows of a step."""
        return takes_rows(self.target) and not self.config.deterministic

    def step(
        self, state: BatchState, num_rows: int, features: Features, timer: PhaseTimer,
        prompts: PromptRows | None = None,
    ) -> Stepped:  # fmt: skip
        """Advances the live rows among the first `num_rows` by their accepted drafts and one token of the target, which
        reads parts of prompts in the same pass, if it `reads_several`."""
        with timer.phase("draft"):
            if self.own is None:
                max_length = None
            else:  # what is past the shortest model's end is never kept
                state, max_length = state.drafts[self.own.number], min(model.max_length for model in self._models)
            batch = Batch(state, slice(0, num_rows), self.drafter.num_slots, max_length)
            proposal = self.drafter.propose(batch)
            if self.mean_nodes < self.num_nodes:
                proposal = prune(batch, proposal, self.mean_nodes)
        with timer.phase("verify"):
            logits, target_features, prompt_output = self._run_target(batch, proposal, prompts)
        with timer.phase("sample"):
            kept = without_early_ends(batch, proposal.tree, logits, features)
            committed = self._verifier.verify(batch, proposal, kept, features)
            result = _result(logits, committed.hidden_rows, committed, features)
        if self.on_tree is not None:
            self.on_tree(Verified(batch, proposal, logits, features, committed))
        with timer.phase("bookkeeping"):
            if self.num_nodes > 1:
                pool, sizes = state.target_pool, {"num_verify_tokens": self.num_nodes}
                accepted = committed.accept_index, committed.accept_token_num
                ops.move_accepted_kv(pool.k_cache, pool.v_cache, batch.block_table, batch.lengths, *accepted, **sizes)
        if self.own is not None or proposal.learn is not None:
            with timer.phase("draft"):
                if self.own is not None:
                    self.own.reader.observe(batch, committed, self.own.of(target_features))
                if proposal.learn is not None:
                    proposal.learn(committed)
        with timer.phase("bookkeeping"):
            for each in self.resting:
                each.keep(batch, committed, target_features)
            if self.keeps_history:
                state.append_to_history(batch.rows, committed.tokens)
            state.sampling.count(features, batch.rows, committed.tokens)
            # dead rows have -1, which is no token
            torch.clamp(committed.bonus_tokens, min=0, out=batch.roots)
            batch.lengths.copy_(committed.new_seq_lens)
        return result, prompt_output

    def draw_first(
        self, logits: Tensor, state: BatchState, rows: Tensor, lengths: Tensor, features: Features
    ) -> StepResult:
        """Draws the token after each prompt, of rows [R] and lengths [R], from the logits [R, V] there."""
        last, kept = lengths - 1, logits
        tree = root_only(torch.zeros_like(last), last)
        if features.minimum:
            kept = ops.penalize_logits(*links_of(tree), logits, **state.sampling.early_ends(rows, last))
        options = {"spec_steps": 0, "return_logprobs": features.logprobs}
        params = state.sampling.arguments(features, rows)
        drawn = ops.verify_tree_sampled(*links_of(tree), kept, tree.positions, **params, **options)
        drawn = drawn._replace(tokens=drawn.predicts.to(torch.int64)[:, None])
        return _result(logits, torch.arange(len(logits), device=logits.device)[:, None], drawn, features)

    def _run_target(
        self, batch: Batch, proposal: Proposal, prompts: PromptRows | None
    ) -> tuple[Tensor, Tensor, PromptOutput | None]:
        """Returns logits [B * N, V] and features [B, N, F] of all nodes, whose KV goes after the committed prefix, and
        what the same pass makes of prompts."""
        shape, tree = (len(batch), self.num_nodes), proposal.tree
        # Drafts past the last position are never kept (the token limit comes first) but must not index out of range.
        positions = tree.positions.view(shape).clamp(max=self.target.max_length - 1)
        slots, options = batch.slots[:, : self.num_nodes], {"deterministic": self.config.deterministic}
        pool, table, tokens, nodes = batch.state.target_pool, batch.block_table, tree.draft_tokens.view(shape), None
        if proposal.num_nodes is not None:
            nodes = PackedNodes(batch, proposal, positions, self.mean_nodes * len(batch), **options)
            tokens, positions, attend = nodes.tokens, nodes.positions, nodes.attend
        elif self.num_nodes > 1:
            mode = self.config.tree_mask_mode
            words = tree.tree_mask
            if mode != ops.TreeMaskMode.PACKED:
                sizes = {"num_verify_tokens": self.num_nodes, "tree_mask_mode": mode}
                words = ops.pack_tree_mask(words, batch.lengths, **sizes)
            attend = TreeAttend(pool, table, batch.lengths, slots, self.num_nodes, words, tree.positions, **options)
        else:
            attend = DecodeAttend(pool, table, batch.lengths, slots, **options)
        if prompts is None:
            logits, features = run_target(self.target, tokens, positions, attend, self.aux_layers)
            logits, prompt_output = logits.flatten(0, 1), None
        else:
            logits, features, prompt_output = self._run_with(prompts, tokens, positions, attend)
        if nodes is not None:
            logits = nodes.unpack(logits)
            features = None if features is None else nodes.unpack(features[0]).unflatten(0, shape)
        if features is None:
            features = logits.new_zeros(*shape, 0)
        return logits, features, prompt_output

    def _run_with(
        self, prompts: PromptRows, tokens: Tensor, positions: Tensor, attend: TreeAttend | DecodeAttend | RaggedAttend
    ) -> tuple[Tensor, Tensor | None, PromptOutput]:
        """Returns logits [B * N, V] and features [B, N, F] of nodes [B, N], and what the same pass makes of prompts."""
        shape, num_nodes = tokens.shape, tokens.numel()
        tokens = torch.cat([tokens.flatten(), prompts.tokens])[None]
        positions = torch.cat([positions.flatten(), prompts.positions])[None]
        last_rows = torch.cat([torch.arange(num_nodes, device=tokens.device), num_nodes + prompts.lasts])
        attend = JointAttend(attend, prompts.attend())
        logits, features = run_target(self.target, tokens, positions, attend, self.aux_layers, last_rows=last_rows)
        ours, theirs = (None, None) if features is None else features.split([num_nodes, prompts.num_tokens], dim=1)
        ours = None if ours is None else ours[0].unflatten(0, shape)
        return logits[0, :num_nodes], ours, PromptOutput(logits[0, num_nodes:], theirs)


def _result(logits: Tensor, rows: Tensor, drawn: Committed, features: Features) -> StepResult:
    """Returns the tokens [B, T] that were drawn at `rows` [B, T] of the target's logits, with what is asked of them."""
    tokens, logprobs, raw = drawn.tokens, *((drawn.logprobs, drawn.raw_logprobs) if features.logprobs else (None, None))
    scores = Scores(raw)
    if features.top or (features.logprobs and features.minimum):  # tokens were drawn from other logits
        scores = score(logits[rows], tokens, features.top)
    return StepResult(tokens, logprobs, None if raw is None else scores.logprobs, scores.top_ids, scores.top_logprobs)
