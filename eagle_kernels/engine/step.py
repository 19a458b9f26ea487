"""One speculative step of a batch: draft a tree, verify it, keep the accepted path.

A step never waits for the device, except with masks of layout `full_mask`, whose size the host must know.

Positions, for a request with n committed tokens t_0 .. t_{n-1} and root t_n (sampled, not yet in the target's KV):
the target reads node of depth d at position n + d. The draft reads token t_i at position and slot i - token_shift, for
EAGLE beside the feature of t_{i-1}. So the draft holds n + 1 - token_shift rows, and level i >= 1 of the tree reads its
tokens at position n + i - token_shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from .config import EAGLEConfig
from .kv_pool import DecodeAttend, KVPool, PromptAttend, TreeAttend
from .models.protocol import DraftModel, TargetModel
from .timing import PhaseTimer


class Sampling(NamedTuple):
    """Sampling parameters of a batch, [B] each; None: the filter is off."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None


@dataclass
class BatchState:
    """What a step starts from and leaves behind.

    lengths         [B] int64   committed tokens in the target's KV; the root not counted
    roots           [B] int64   last committed token
    is_live         [B] int64   1, or 0 once the request has ended: the row is then computed in place and never grows
    seeds           [B] int64
    sampling                    None: greedy
    draft_logits    [B, Vd]     what the draft says after the root
    draft_hidden    [B, H]      the draft's own state there
    """

    lengths: Tensor
    roots: Tensor
    is_live: Tensor
    seeds: Tensor
    sampling: Sampling | None
    draft_logits: Tensor | None = None
    draft_hidden: Tensor | None = None


class StepResult(NamedTuple):
    """tokens [B, S + 1] int64, accepted drafts then the bonus, -1 padded; accepted [B] int32 drafts.

    Rows that are not live have tokens -1 and a count that means nothing.
    """

    tokens: Tensor
    accepted: Tensor


class Stepper:
    """Prefills a batch and steps it. Without a draft a step is plain decoding: a tree that is its root."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        config: EAGLEConfig,
        target_pool: KVPool,
        draft_pool: KVPool | None,
        timer: PhaseTimer,
    ):
        self.target, self.draft, self.config = target, draft, config
        self.target_pool, self.draft_pool, self.timer = target_pool, draft_pool, timer
        self.num_steps = config.num_steps if draft else 0
        self.num_nodes = config.num_verify_tokens if draft else 1
        self._capture = draft.aux_layers if draft else ()
        self._policy = {}
        if draft and config.accept_policy != "normal":
            self._policy["accept_policy"] = config.accept_policy
        if draft and config.simulated_rates is not None:
            self._policy["simulated_rates"] = torch.tensor(config.simulated_rates, device=target.device)
        if draft:
            # Of an accepted path, root included: each row sees itself and the rows before it.
            rows, page_table = self.num_steps + 1, target_pool.block_table
            causal = torch.ones(len(page_table), rows, rows, dtype=torch.bool, device=page_table.device).tril()
            self._causal_words = ops.pack_tree_mask(causal)

    def prefill(self, prompts: list[Tensor], seeds: Tensor, sampling: Sampling | None) -> BatchState:
        """Runs the prompts (each [L] int64) and draws the token that follows; that token is the first root."""
        device = seeds.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        outputs = [
            self.target.forward(
                prompt[None],
                torch.arange(len(prompt), device=device)[None],
                PromptAttend(self.target_pool, request, len(prompt)),
                capture=self._capture,
                last_only=True,
            )
            for request, prompt in enumerate(prompts)
        ]
        logits = torch.cat([output.logits[:, -1] for output in outputs])
        greedy = Sampling(torch.zeros(len(prompts), device=device), None, None, None)
        roots = ops.sample_from_logits(logits, lengths, seeds, *(sampling or greedy))
        state = BatchState(lengths, roots, torch.ones_like(lengths), seeds, sampling)
        if self.draft:
            rows = [
                self._prefill_draft(request, torch.cat([prompt, roots[request, None]]), outputs[request].features)
                for request, prompt in enumerate(prompts)
            ]
            state.draft_logits = torch.cat([row.logits[:, -1] for row in rows])
            state.draft_hidden = torch.cat([row.hidden[:, -1] for row in rows])
        return state

    def _prefill_draft(self, request: int, tokens: Tensor, features: Tensor | None):
        """Draft rows of t_shift .. t_n: each token beside the feature of the token before it."""
        shift = self.draft.token_shift
        num_rows = len(tokens) - shift
        if features is None:
            features = torch.zeros(1, len(tokens) - 1, 0, device=tokens.device, dtype=self.target.dtype)
        no_feature = features.new_zeros(1, 1 - shift, features.shape[-1])
        return self.draft.forward(
            tokens[None, shift:],
            torch.cat([no_feature, features], dim=1),
            torch.arange(num_rows, device=tokens.device)[None],
            PromptAttend(self.draft_pool, request, num_rows),
            from_target=True,
        )

    def step(self, state: BatchState) -> StepResult:
        """Advances every live request by its accepted drafts and one token of the target."""
        with self.timer.phase("draft"):
            tree = self._draft_tree(state) if self.draft else self._root_only(state)
        with self.timer.phase("verify"):
            logits, features = self._run_target(state, tree)
        with self.timer.phase("sample"):
            verdict = self._verify(state, tree, logits)
        with self.timer.phase("bookkeeping"):
            commit = ops.verify_commit(*verdict[:3], state.lengths, state.is_live)
            if self.draft:
                ops.move_accepted_kv(
                    self.target_pool.k_cache,
                    self.target_pool.v_cache,
                    self.target_pool.block_table,
                    state.lengths,
                    verdict.accept_index,
                    verdict.accept_token_num,
                    num_verify_tokens=self.num_nodes,
                )
        if self.draft:
            with self.timer.phase("draft"):
                self._extend_draft(state, commit, features)
        with self.timer.phase("bookkeeping"):
            state.roots = torch.where(state.is_live > 0, commit.bonus_tokens, state.roots)
            state.lengths = commit.new_seq_lens
        return StepResult(commit.tokens, verdict.accept_token_num)

    def _draft_tree(self, state: BatchState) -> ops.BuildTreeOutput:
        """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the best beams level by level, then rerank."""
        config, topk = self.config, self.config.topk
        batch_size = len(state.lengths)
        draft_lengths = self._draft_lengths(state)
        scores, tokens, parent_slots = [], [], [torch.full_like(state.lengths, -1)[:, None]]
        offsets = self.draft.draft_to_target
        level = ops.select_top_k_tokens(state.draft_logits, draft_to_target=offsets, topk=topk, level=0)
        hidden = state.draft_hidden[:, None].expand(-1, topk, -1)
        for depth in range(1, self.num_steps):
            scores.append(level.candidate_scores)
            tokens.append(level.candidate_tokens)
            parent_slots.append(level.parent_slots)
            positions = (draft_lengths + depth - 1)[:, None].expand(batch_size, topk)
            key_positions = draft_lengths[:, None] + torch.arange(depth * topk, device=draft_lengths.device) // topk
            output = self.draft.forward(
                level.tokens,
                hidden,
                positions.clamp(max=self.draft.max_length - 1),
                TreeAttend(
                    self.draft_pool,
                    draft_lengths,
                    (depth - 1) * topk,
                    topk,
                    level.ancestors,
                    positions,
                    key_positions,
                ),
                from_target=False,
            )
            level = ops.select_top_k_tokens(
                output.logits.flatten(0, 1), level.scores, level.ancestors, offsets, topk=topk, level=depth
            )
            hidden = output.hidden.gather(1, level.parents[..., None].expand(-1, -1, output.hidden.shape[-1]))
        tree = ops.build_tree_from_scores(
            state.roots,
            torch.cat([*scores, level.candidate_scores], dim=1),
            torch.cat([*tokens, level.candidate_tokens], dim=1),
            torch.cat(parent_slots, dim=1),
            state.lengths,
            self._full_mask_size(state),
            topk=topk,
            spec_steps=self.num_steps,
            num_verify_tokens=self.num_nodes,
            tree_mask_mode=config.tree_mask_mode,
        )
        return ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)])

    def _full_mask_size(self, state: BatchState) -> int | None:
        """Only the full-mask layout needs the host to know the lengths."""
        return int(state.lengths.sum()) if self.config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK else None

    def _root_only(self, state: BatchState) -> ops.BuildTreeOutput:
        none = state.roots.new_empty(len(state.roots), 0)
        root_slot = torch.full_like(state.roots, -1)[:, None]
        return ops.build_tree(
            state.roots, root_slot, none, none, state.lengths, topk=1, spec_steps=1, num_verify_tokens=1
        )

    def _run_target(self, state: BatchState, tree: ops.BuildTreeOutput) -> tuple[Tensor, Tensor]:
        """Logits [B * N, V] and features [B, N, F] of all nodes; their KV lands behind the committed prefix."""
        shape = (len(state.lengths), self.num_nodes)
        if self.draft:
            mode = self.config.tree_mask_mode
            words = tree.tree_mask
            if mode != ops.TreeMaskMode.PACKED:
                sizes = {"num_verify_tokens": self.num_nodes, "tree_mask_mode": mode}
                words = ops.pack_tree_mask(words, state.lengths, **sizes)
            attend = TreeAttend(self.target_pool, state.lengths, 0, self.num_nodes, words, tree.positions)
        else:
            attend = DecodeAttend(self.target_pool, state.lengths)
        # Drafts past the last position are never kept (the token limit comes first) but must not index out of range.
        positions = tree.positions.view(shape).clamp(max=self.target.max_length - 1)
        output = self.target.forward(tree.draft_tokens.view(shape), positions, attend, capture=self._capture)
        features = output.features
        if features is None:
            features = output.logits.new_zeros(*shape, 0)
        return output.logits.flatten(0, 1), features

    def _verify(self, state: BatchState, tree: ops.BuildTreeOutput, logits: Tensor) -> ops.VerifyOutput:
        links = (tree.draft_tokens.view_as(tree.retrieve_index), tree.retrieve_index)
        links += (tree.retrieve_next_token, tree.retrieve_next_sibling)
        if state.sampling is None:
            coins = {}
            if self._policy.get("accept_policy") == "simulate":
                coins = {"positions": tree.positions, "seeds": state.seeds}
            return ops.verify_tree(*links, logits, **coins, **self._policy, spec_steps=self.num_steps)
        return ops.verify_tree(
            *links,
            logits,
            positions=tree.positions,
            seeds=state.seeds,
            **state.sampling._asdict(),
            **self._policy,
            spec_steps=self.num_steps,
        )

    def _extend_draft(self, state: BatchState, commit: ops.CommitOutput, features: Tensor) -> None:
        """Gives the draft the target's true features of the accepted path; its tree rows are overwritten.

        Row d reads the token that follows path node d beside that node's feature; rows past the path are padding that
        only later rows see.
        """
        num_rows = commit.tokens.shape[1]
        draft_lengths = self._draft_lengths(state)
        positions = draft_lengths[:, None] + torch.arange(num_rows, device=commit.tokens.device)
        output = self.draft.forward(
            commit.tokens.clamp(min=0),
            features.flatten(0, 1)[commit.hidden_rows],
            positions.clamp(max=self.draft.max_length - 1),
            TreeAttend(self.draft_pool, draft_lengths, 0, num_rows, self._causal_words, positions),
            from_target=True,
        )
        state.draft_logits = output.logits.flatten(0, 1)[commit.last_row]
        state.draft_hidden = output.hidden.flatten(0, 1)[commit.last_row]

    def _draft_lengths(self, state: BatchState) -> Tensor:
        return state.lengths + 1 - self.draft.token_shift
