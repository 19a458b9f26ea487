"""One speculative step of a batch: draft a tree, verify it, keep the accepted path.

A step never waits for the device and changes its batch in place, so that it can be captured in a CUDA graph as it is;
only masks of layout `full_mask`, whose size the host must know, are not captured.

Positions, for a request with n committed tokens t_0 .. t_{n-1} and root t_n (sampled, not yet in the target's KV):
the target reads node of depth d at position n + d. The draft reads token t_i at position and slot i - token_shift, for
EAGLE beside the feature of t_{i-1}. So the draft holds n + 1 - token_shift rows, and level i >= 1 of the tree reads its
tokens at position n + i - token_shift.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from .batch_state import MEMORY, BatchState
from .config import EAGLEConfig
from .kv_pool import DecodeAttend, TreeAttend
from .models.protocol import DraftModel, TargetModel
from .sampling import Features
from .timing import PhaseTimer


class StepResult(NamedTuple):
    """What the host reads after a step; of rows that are not live nothing means anything.

    tokens    [B, S + 1] int64  what the step brought: accepted drafts and the bonus, -1 padded
    logprobs  [B, S + 1] fp32   of these tokens, among those that the filters left, and
    raw_logprobs                by the logits as given; both None where no request asked for either
    """

    tokens: Tensor
    logprobs: Tensor | None
    raw_logprobs: Tensor | None


class _Committed(NamedTuple):
    """Verification's verdict and what it leads to, from either verification op; see `ops.verify_commit`."""

    accept_index: Tensor
    accept_token_num: Tensor
    new_seq_lens: Tensor
    bonus_tokens: Tensor
    tokens: Tensor
    hidden_rows: Tensor
    last_row: Tensor
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


class Stepper:
    """Steps a batch with one configuration. Without a draft a step is plain decoding: a tree that is its root.

    is_plain: plain steps that keep for the draft what it misses, so that it can come back (`catch_up`).
    """

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        config: EAGLEConfig,
        is_plain: bool = False,
    ):
        self.target, self.config = target, config
        self.draft = None if is_plain else draft
        self.resting_draft = draft if is_plain else None
        self.any_draft = draft
        self.aux_layers = () if draft is None else draft.aux_layers
        draft = self.draft
        self.num_steps = config.num_steps if draft else 0
        self.num_nodes = config.num_verify_tokens if draft else 1
        self._policy = {}
        if draft and config.accept_policy != "normal":
            self._policy["accept_policy"] = config.accept_policy
        if draft and config.simulated_rates is not None:
            self._policy["simulated_rates"] = torch.tensor(config.simulated_rates, device=target.device)

    @property
    def can_be_captured(self) -> bool:
        if not all(getattr(model, "can_be_captured", True) for model in (self.target, self.any_draft)):
            return False
        return self.draft is None or self.config.tree_mask_mode != ops.TreeMaskMode.FULL_MASK

    def step(self, state: BatchState, num_rows: int, features: Features, timer: PhaseTimer) -> StepResult:
        """Advances the live ones of the first `num_rows` rows by their accepted drafts and one token of the target."""
        with timer.phase("draft"):
            batch = _Batch(self, state, slice(0, num_rows))
            tree = self._draft_tree(batch) if self.draft else _root_only(batch.roots, batch.lengths)
        with timer.phase("verify"):
            logits, target_features = self._run_target(batch, tree)
        with timer.phase("sample"):
            committed = self._verify(batch, tree, logits, features)
        with timer.phase("bookkeeping"):
            if self.draft:
                ops.move_accepted_kv(
                    state.target_pool.k_cache,
                    state.target_pool.v_cache,
                    batch.block_table,
                    batch.lengths,
                    committed.accept_index,
                    committed.accept_token_num,
                    num_verify_tokens=self.num_nodes,
                )
        if self.draft:
            with timer.phase("draft"):
                self._extend_draft(batch, committed, target_features)
        with timer.phase("bookkeeping"):
            if self.resting_draft:
                batch.keep_for_draft(committed.bonus_tokens, target_features)
            state.sampling.count(features, batch.rows, committed.tokens)
            # of rows that are not live -1, which is no token
            torch.clamp(committed.bonus_tokens, min=0, out=batch.roots)
            batch.lengths.copy_(committed.new_seq_lens)
        return StepResult(committed.tokens, committed.logprobs, committed.raw_logprobs)

    def catch_up(self, state: BatchState, num_rows: int, is_wanted: bool) -> None:
        """The resting draft reads what the first `num_rows` rows have for it.

        is_wanted: it drafts next. Else a plain step follows, and then it reads that one, so keys are enough by now.
        """
        draft, pool, rows = self.resting_draft, state.draft_pool, slice(0, num_rows)
        count, table = state.num_behind[rows], state.block_table[rows]
        first = state.lengths[rows] + (1 - draft.token_shift) - count
        slots, positions = ops.find_slots(
            table, first, count=MEMORY, page_size=pool.page_size, max_length=draft.max_length
        )
        # rows past what was missed are padding that only later rows see, in slots that hold nothing yet
        attend = TreeAttend(pool, table, first, slots, MEMORY, None, positions)
        missed = state.missed_tokens[rows], state.missed_features[rows], positions, attend
        if not is_wanted and hasattr(draft, "store"):
            draft.store(*missed)
            count.zero_()
            return
        output = draft.forward(*missed, from_target=True)
        last = torch.arange(num_rows, device=first.device) * MEMORY + (count - 1).clamp(min=0)
        for kept, read in ((state.draft_logits, output.logits), (state.draft_hidden, output.hidden)):
            kept[rows].copy_(torch.where((count > 0)[:, None], read.flatten(0, 1)[last], kept[rows]))
        count.zero_()

    def draw_first(self, logits: Tensor, state: BatchState, row: int, length: int, features: Features) -> StepResult:
        """The token behind a prompt of `length` tokens, by the logits [1, V] of its last one: the row's first root."""
        last = torch.full((1,), length - 1, device=logits.device)
        tree = _root_only(torch.zeros_like(last), last)
        rows = slice(row, row + 1)
        drawn = ops.verify_tree_sampled(
            *_links(tree),
            logits,
            tree.positions,
            # copies: a row's own address is aligned like no other row's, and kernels are compiled for alignments
            **{name: values.clone() for name, values in state.sampling.arguments(features, rows).items()},
            spec_steps=0,
            return_logprobs=features.logprobs,
        )
        root = drawn.predicts.to(torch.int64)
        state.roots[rows] = root
        state.sampling.count(features, rows, root[:, None])
        logprobs = (drawn.logprobs, drawn.raw_logprobs) if features.logprobs else (None, None)
        return StepResult(root[:, None], *logprobs)

    def _draft_tree(self, batch: _Batch) -> ops.BuildTreeOutput:
        """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the best beams level by level, then rerank."""
        config, topk = self.config, self.config.topk
        size, offsets = len(batch.lengths), self.draft.draft_to_target
        candidates = _Candidates(size, topk, self.num_steps, batch.lengths.device)
        level = ops.select_top_k_tokens(
            batch.draft_logits, draft_to_target=offsets, topk=topk, level=0, out=candidates.level(0)
        )
        hidden = batch.draft_hidden[:, None].expand(-1, topk, -1)
        for depth in range(1, self.num_steps):
            output = self.draft.forward(
                level.tokens,
                hidden,
                batch.draft_positions[:, depth - 1 : depth].expand(size, topk),
                batch.level_attend(depth, topk, level.ancestors),
                from_target=False,
            )
            level = ops.select_top_k_tokens(
                output.logits.flatten(0, 1), level.scores, level.ancestors, offsets,
                topk=topk, level=depth, out=candidates.level(depth),
            )  # fmt: skip
            hidden = output.hidden.flatten(0, 1)[level.hidden_rows]
        tree = ops.build_tree_from_scores(
            batch.roots,
            candidates.scores,
            candidates.tokens,
            candidates.parent_slots,
            batch.lengths,
            self._full_mask_size(batch),
            topk=topk,
            spec_steps=self.num_steps,
            num_verify_tokens=self.num_nodes,
            tree_mask_mode=config.tree_mask_mode,
        )
        return ops.BuildTreeOutput(*tree[: len(ops.BuildTreeOutput._fields)])

    def _full_mask_size(self, batch: _Batch) -> int | None:
        """Only the full-mask layout needs the host to know the lengths."""
        return int(batch.lengths.sum()) if self.config.tree_mask_mode == ops.TreeMaskMode.FULL_MASK else None

    def _run_target(self, batch: _Batch, tree: ops.BuildTreeOutput) -> tuple[Tensor, Tensor]:
        """Logits [B * N, V] and features [B, N, F] of all nodes; their KV lands behind the committed prefix."""
        shape = (len(batch.lengths), self.num_nodes)
        # Drafts past the last position are never kept (the token limit comes first) but must not index out of range.
        positions = tree.positions.view(shape).clamp(max=self.target.max_length - 1)
        slots = batch.slots[:, : self.num_nodes]
        if self.draft:
            mode = self.config.tree_mask_mode
            words = tree.tree_mask
            if mode != ops.TreeMaskMode.PACKED:
                sizes = {"num_verify_tokens": self.num_nodes, "tree_mask_mode": mode}
                words = ops.pack_tree_mask(words, batch.lengths, **sizes)
            attend = TreeAttend(
                batch.state.target_pool, batch.block_table, batch.lengths, slots, self.num_nodes, words, tree.positions
            )
        else:
            attend = DecodeAttend(batch.state.target_pool, batch.block_table, batch.lengths, slots)
        output = self.target.forward(tree.draft_tokens.view(shape), positions, attend, capture=self.aux_layers)
        features = output.features
        if features is None:
            features = output.logits.new_zeros(*shape, 0)
        return output.logits.flatten(0, 1), features

    def _verify(self, batch: _Batch, tree: ops.BuildTreeOutput, logits: Tensor, features: Features) -> _Committed:
        if features.draws:
            drawn = ops.verify_tree_sampled(
                *_links(tree),
                logits,
                tree.positions,
                **batch.sampling_arguments(features),
                **self._policy,
                seq_lens=batch.lengths,
                is_live=batch.is_live,
                spec_steps=self.num_steps,
                return_logprobs=features.logprobs,
            )
            drawn = drawn._asdict() | ({} if features.logprobs else {"logprobs": None, "raw_logprobs": None})
            return _Committed(**{name: drawn[name] for name in _Committed._fields})
        coins = {}
        if self._policy.get("accept_policy") == "simulate":
            coins = {"positions": tree.positions, "seeds": batch.seeds}
        verdict = ops.verify_tree_greedy(
            *_links(tree), target_logits=logits, **coins, **self._policy, spec_steps=self.num_steps
        )
        commit = ops.verify_commit(*verdict[:3], batch.lengths, batch.is_live)
        commit = {name: getattr(commit, name) for name in _Committed._fields if name in commit._fields}
        return _Committed(verdict.accept_index, verdict.accept_token_num, **commit)

    def _extend_draft(self, batch: _Batch, committed: _Committed, features: Tensor) -> None:
        """Gives the draft the target's true features of the accepted path; its tree rows are overwritten.

        Row d reads the token that follows path node d beside that node's feature; rows past the path are padding that
        only later rows see.
        """
        output = self.draft.forward(
            committed.tokens.clamp(min=0),
            features.flatten(0, 1)[committed.hidden_rows],
            batch.draft_positions,
            batch.path_attend(),
            from_target=True,
        )
        torch.index_select(output.logits.flatten(0, 1), 0, committed.last_row, out=batch.draft_logits)
        torch.index_select(output.hidden.flatten(0, 1), 0, committed.last_row, out=batch.draft_hidden)


class _Candidates:
    """What the levels of a draft propose, side by side as `build_tree_from_scores` reads it.

    scores, tokens  [B, C]  C = K + (S - 1) * K * K
    parent_slots    [B, P]  P = K * (S - 1) + 1, the root's -1 first
    """

    def __init__(self, size: int, topk: int, num_steps: int, device: torch.device):
        self._size, self._topk, self._num_steps, self._device = size, topk, num_steps, device
        num_candidates = topk + (num_steps - 1) * topk * topk
        self.scores = torch.empty(size, num_candidates, device=device)
        self.tokens = torch.empty(size, num_candidates, dtype=torch.int64, device=device)
        self.parent_slots = torch.full((size, 1 + (num_steps - 1) * topk), -1, device=device)

    def level(self, level: int) -> tuple[Tensor, ...]:
        """Where `select_top_k_tokens` writes one level."""
        topk = self._topk
        begin = topk + (level - 1) * topk * topk if level else 0
        end = topk + level * topk * topk
        beams = torch.empty(4, self._size, topk, dtype=torch.int64, device=self._device)
        scores = torch.empty(self._size, topk, device=self._device)
        num_words = -(-(level + 1) * topk // 64)
        ancestors = torch.empty(self._size, topk, num_words, dtype=torch.int64, device=self._device)
        tokens, parents, hidden_rows, parent_slots = beams
        if level < self._num_steps - 1:  # nobody reads the last level's
            parent_slots = self.parent_slots[:, 1 + level * topk : 1 + (level + 1) * topk]
        candidates = self.scores[:, begin:end], self.tokens[:, begin:end]
        return scores, tokens, parents, hidden_rows, parent_slots, *candidates, ancestors


def _root_only(roots: Tensor, lengths: Tensor) -> ops.BuildTreeOutput:
    """A tree without drafts: [B] roots behind [B] committed tokens."""
    none = roots.new_empty(len(roots), 0)
    root_slot = torch.full_like(roots, -1)[:, None]
    return ops.build_tree(roots, root_slot, none, none, lengths, topk=1, spec_steps=1, num_verify_tokens=1)


def _links(tree: ops.BuildTreeOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree as verification takes it."""
    candidates = tree.draft_tokens.view_as(tree.retrieve_index)
    return candidates, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling


class _Batch:
    """The rows of a step, and where their new keys go.

    slots            [B, M] int64  of the tokens behind the committed ones, for the target's nodes
    draft_lengths    [B]           rows that the draft holds
    draft_positions  [B, S + 1]    of the rows behind those
    """

    def __init__(self, stepper: Stepper, state: BatchState, rows: slice):
        self.state, self.rows = state, rows
        self.lengths, self.roots, self.is_live = state.lengths[rows], state.roots[rows], state.is_live[rows]
        self.block_table, self.seeds = state.block_table[rows], state.sampling.seeds[rows]
        draft, page_size = stepper.draft, state.target_pool.page_size
        if draft is None:
            self.slots = ops.find_slots(self.block_table, self.lengths, count=1, page_size=page_size).slots
            return
        self.draft_logits, self.draft_hidden = state.draft_logits[rows], state.draft_hidden[rows]
        behind = 1 - draft.token_shift
        count = rows_behind(stepper.config, draft.token_shift)
        self.slots, positions = ops.find_slots(
            self.block_table, self.lengths, count=count, page_size=page_size, max_length=draft.max_length
        )
        self._draft_slots = self.slots[:, behind:]
        self.draft_lengths = self.lengths + behind if behind else self.lengths
        self.draft_positions = positions[:, behind : behind + stepper.num_steps + 1]

    def keep_for_draft(self, roots: Tensor, features: Tensor) -> None:
        """The new roots [B] and, beside each, the feature [B, 1, F] of the token before it."""
        count = self.state.num_behind[self.rows]
        row, place = torch.arange(len(count), device=count.device), count.clamp(max=MEMORY - 1)
        self.state.missed_tokens[self.rows][row, place] = roots.clamp(min=0)
        self.state.missed_features[self.rows][row, place] = features[:, 0]
        count.add_(self.is_live)

    def sampling_arguments(self, features: Features) -> dict[str, Tensor]:
        return self.state.sampling.arguments(features, self.rows)

    def level_attend(self, depth: int, topk: int, ancestors: Tensor) -> TreeAttend:
        """Of the beams of level `depth`, which see those of the levels before."""
        first, positions = (depth - 1) * topk, self.draft_positions
        return TreeAttend(
            self.state.draft_pool,
            self.block_table,
            self.draft_lengths,
            self._draft_slots[:, first : first + topk],
            first + topk,
            ancestors,
            positions[:, depth - 1 : depth].expand(-1, topk),
            positions[:, :depth, None].expand(-1, -1, topk),
        )

    def path_attend(self) -> TreeAttend:
        """Of the accepted path, which is a chain."""
        num_rows = self.draft_positions.shape[1]
        return TreeAttend(
            self.state.draft_pool,
            self.block_table,
            self.draft_lengths,
            self._draft_slots[:, :num_rows],
            num_rows,
            None,
            self.draft_positions,
        )


def rows_behind(config: EAGLEConfig, token_shift: int) -> int:
    """Slots behind a request's committed tokens that a step may write, in either pool."""
    levels = (config.num_steps - 1) * config.topk
    return max(config.num_verify_tokens, 1 - token_shift + max(levels, config.num_steps + 1))
