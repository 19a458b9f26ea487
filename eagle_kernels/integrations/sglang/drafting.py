"""Drafting of trees in SGLang: each level's candidates straight from logits, in one op and without a softmax.

SGLang multiplies probabilities, we add their logarithms: the order of candidates is the same up to rounding.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch

from ...ops import organize_draft_results, select_top_k_tokens
from ...ops.tree.select_top_k_tokens import Output as Level
from ...ops.tree.shared.levels import MAX_TOPK
from ...ops.tree.shared.tree_contract import MAX_CANDIDATES


def draft_forward(original, worker, forward_batch):
    """Drafts a tree for each request; leaves chains, rejection sampling and idle batches to SGLang.
    Returns parent_list [B, K * (S - 1) + 1], top_scores_index [B, N - 1], draft tokens [B, N - 1] and None, as SGLang's
    method of this name does."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

    topk, num_steps = worker.topk, worker.speculative_num_steps
    is_ours = (
        1 < topk <= MAX_TOPK
        and num_steps > 1
        and topk + (num_steps - 1) * topk**2 <= MAX_CANDIDATES
        and not forward_batch.forward_mode.is_idle()
        and not get_spec().speculative_use_rejection_sampling
        and not worker.index_share_for_mtp_iteration
        and not worker.draft_runner.model_config.model_is_mrope
        and worker.draft_runner.canary_manager is None
    )
    if not is_ours:
        return original(worker, forward_batch)
    spec_info = forward_batch.spec_info
    batch_size = forward_batch.batch_size
    slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, batch_size, topk, num_steps)
    if worker.draft_runner.model_config.hf_config.architectures[0] == "Qwen3MoeForCausalLMMTP":
        slots = slots.contiguous()  # its fused rotary embedding and KV write takes no strides
    constants = _constants(worker)
    levels = _Levels(batch_size, topk, num_steps, spec_info.topk_p.device)
    level = levels.first(spec_info.topk_p, spec_info.topk_index, worker.hot_token_id, constants)
    hidden_states = spec_info.hidden_states
    for step in range(num_steps - 1):
        forward_batch.input_ids = level.tokens.flatten()
        forward_batch.out_cache_loc = slots[step]
        if hidden_states is not None:
            spec_info.hidden_states = hidden_states.index_select(0, level.hidden_rows.view(-1))
        with _attention(worker.draft_attn_backend.attn_backends[step], forward_batch):
            result = worker.draft_runner.forward(forward_batch).logits_output
        forward_batch.positions.add_(1)
        hidden_states = result.hidden_states
        level = select_top_k_tokens(
            result.next_token_logits, level.scores, level.ancestors, constants.draft_to_target,
            topk=topk, level=step + 1, out=levels.output(step + 1),
        )  # fmt: skip
    kept = organize_draft_results(
        levels.scores, levels.tokens, num_verify_tokens=worker.speculative_num_draft_tokens
    )  # fmt: skip
    return levels.parent_list, kept.top_scores_index, kept.draft_tokens, None


class _Levels:
    """The candidates of all levels, which `select_top_k_tokens` writes one after another."""

    def __init__(self, batch_size: int, topk: int, num_steps: int, device: torch.device):
        self.topk, self.num_steps = topk, num_steps
        self.make = lambda *shape, dtype=torch.int64: torch.empty(batch_size, *shape, dtype=dtype, device=device)
        num_candidates = topk + (num_steps - 1) * topk**2
        self.scores = self.make(num_candidates, dtype=torch.float32)
        self.tokens = self.make(num_candidates)
        self.parent_list = self.make(topk * (num_steps - 1) + 1)

    def first(
        self, probs: torch.Tensor, tokens: torch.Tensor, hot_token_id: torch.Tensor | None, constants: _Constants
    ) -> Level:
        """Enters the candidates that came with the batch: probs fp32 [B, K], ids [B, K] of the draft's vocabulary."""
        scores = probs.log()
        if hot_token_id is not None:
            tokens = hot_token_id[tokens]
        self.scores[:, : self.topk] = scores
        self.tokens[:, : self.topk] = tokens
        self.parent_list[:, : self.topk + 1] = constants.parents
        batch_size = len(tokens)
        rows = torch.arange(batch_size, device=tokens.device)[:, None].expand(-1, self.topk)
        ancestors = constants.ancestors.expand(batch_size, -1, -1)
        return Level(scores, tokens, None, rows.contiguous(), None, None, None, ancestors.contiguous())

    def output(self, level: int) -> Level:
        """Returns what a level writes: its part of the candidates, and tensors of its own."""
        topk, make = self.topk, self.make
        first = topk + (level - 1) * topk**2
        slots = slice(1 + level * topk, 1 + (level + 1) * topk)
        is_last = level == self.num_steps - 1  # its beams are expanded no more
        return Level(
            scores=make(topk, dtype=torch.float32),
            tokens=make(topk),
            parents=make(topk),
            hidden_rows=make(topk),
            parent_slots=make(topk) if is_last else self.parent_list[:, slots],
            candidate_scores=self.scores[:, first : first + topk**2],
            candidate_tokens=self.tokens[:, first : first + topk**2],
            ancestors=make(topk, -(-(level + 1) * topk // 64)),
        )


class _Constants(NamedTuple):
    """What is the same in every batch of a worker."""

    draft_to_target: torch.Tensor | None  # int64 [Vd], added to ids of the draft's vocabulary
    parents: torch.Tensor  # int64 [K + 1], the first slots of a parent list
    ancestors: torch.Tensor  # int64 [1, K, 1], of the first beams of every request


def _constants(worker) -> _Constants:
    """Returns the worker's constants, made at its first batch."""
    constants = getattr(worker, "eagle_kernels_constants", None)
    if constants is None:
        hot_token_id, topk, device = worker.hot_token_id, worker.topk, worker.device
        draft_to_target = None
        if hot_token_id is not None:
            draft_to_target = hot_token_id - torch.arange(len(hot_token_id), device=device)
        beams = torch.arange(topk, device=device)
        constants = worker.eagle_kernels_constants = _Constants(
            draft_to_target,
            torch.arange(-1, topk, device=device),
            (1 << beams)[None, :, None],
        )
    return constants


def _attention(backend, forward_batch):
    """Enters the context in which layers find their attention; newer versions of SGLang want the batch too."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    more = {"forward_batch": forward_batch} if "forward_batch" in inspect.signature(forward_context).parameters else {}
    return forward_context(ForwardContext(attn_backend=backend), **more)
