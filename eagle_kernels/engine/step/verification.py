"""Verification of a step's trees by one of five strategies: which drafts are kept, and which token follows. `greedy`,
`target_match` and `rejection` are lossless; `topp` and `typical` are not, as their docstrings say."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...primitives.rows import GREEDY_TEMPERATURE
from ..batch.state import Batch, Committed
from ..config.eagle_config import EAGLEConfig
from ..drafters.protocol import Proposal
from ..requests.sampling_params import MOST_TOP_LOGPROBS, Features


class Scores(NamedTuple):
    """Holds the log-probabilities of tokens, and the most likely tokens, those first."""

    logprobs: Tensor  # [..] fp32
    top_ids: Tensor | None = None  # [.., K] int64; of equally likely ones, the lowest ids come first
    top_logprobs: Tensor | None = None  # [.., K] fp32; both None where nobody asked


def score(logits: Tensor, tokens: Tensor, has_top: bool) -> Scores:
    """Scores tokens [..] by the target's logits [.., V] in their places; those of tokens below 0 mean nothing."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    if not has_top:
        return Scores(own)
    # torch.topk takes any of equal values. Here no two are: the larger the bits of a number below 0, the less it is
    size = logits.shape[-1]
    order = -(logprobs.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) * size - torch.arange(size, device=logits.device)
    ids = order.topk(min(MOST_TOP_LOGPROBS, size), dim=-1).indices
    return Scores(own, ids, logprobs.gather(-1, ids))


class Verifier:
    """Verifies by one of the strategies; trees are at most `num_steps` drafts deep. Without drafts every strategy is
    plain decoding."""

    def __init__(self, config: EAGLEConfig, num_steps: int, device: torch.device):
        self._config, self._num_steps, self._policy = config, num_steps, {}
        others = {"topp": self.keep_candidates, "typical": self.keep_likely, "rejection": self.reject}
        self._strategy = others.get(config.verify_strategy, self.match_target) if num_steps else self.match_target
        if num_steps and config.accept_policy != "normal":
            self._policy["accept_policy"] = config.accept_policy
        if num_steps and config.simulated_rates is not None:
            # rates may be ints
            self._policy["simulated_rates"] = torch.tensor(config.simulated_rates, dtype=torch.float32, device=device)

    def verify(self, batch: Batch, proposal: Proposal, logits: Tensor, features: Features) -> Committed:
        """Returns the verdict on a step's drafts, given the target's logits [B * N, V] at all nodes."""
        return self._strategy(batch, proposal, logits, features)

    def match_target(self, batch: Batch, proposal: Proposal, logits: Tensor, features: Features) -> Committed:
        """Draws the target's token at each node as plain decoding would, and keeps drafts equal to it. Greedy rows need
        no draws; `greedy` is this strategy for requests of temperature 0 only."""
        tree = proposal.tree
        if features.draws:
            drawn = ops.verify_tree_sampled(
                *links_of(tree), logits, tree.positions, **batch.sampling_arguments(features), **self._policy,
                seq_lens=batch.lengths, is_live=batch.is_live, spec_steps=self._num_steps,
                return_logprobs=features.logprobs,
            )  # fmt: skip
            drawn = drawn._asdict() | ({} if features.logprobs else {"logprobs": None, "raw_logprobs": None})
            return Committed(**{name: drawn[name] for name in Committed._fields})
        coins = {}
        if self._policy.get("accept_policy") == "simulate":
            coins = {"positions": tree.positions, "seeds": batch.seeds}
        verdict = ops.verify_tree_greedy(
            *links_of(tree), target_logits=logits, **coins, **self._policy, spec_steps=self._num_steps
        )
        return _commit(batch, verdict)

    def keep_candidates(self, batch: Batch, proposal: Proposal, logits: Tensor, features: Features) -> Committed:
        """LOSSY. Keeps every draft among the target's candidates, whatever its probability, like FastDeploy's TOPP.
        Candidates are the tokens that the request's filters leave, if there are at most `max_candidate_len` of them. If
        there are more, the `max_candidate_len` most likely tokens are candidates with top_p = 1, and none otherwise.
        Regardless of the filters, the second most likely token is kept as well where each of the next `verify_window`
        drafts is the most likely token (`ops.verify_tree_topp`)."""
        tree, params = proposal.tree, _params_of_nodes(batch, proposal)
        _, temperature, top_k, top_p, min_p = params
        logits = penalized(batch, tree, logits, features)
        num_candidates = self._config.max_candidate_len
        best = ops.select_top_k_tokens(logits.float(), topk=num_candidates, level=0)
        num_kept = torch.where(temperature < GREEDY_TEMPERATURE, 1, num_candidates)
        if features.filters:
            num_left = (_filtered(logits, *params) > 0).sum(-1)
            most = torch.where(top_p < 1, 0, num_candidates)
            num_left = torch.where(num_left > num_candidates, most, num_left)
            # by each row's own filters: a row without any also keeps tokens whose probability rounds to 0
            has_filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
            num_kept = torch.where(has_filters, num_left, num_kept)
        own = ops.sample_from_logits(logits, tree.positions + 1, *params).view_as(tree.retrieve_index)
        sizes = {"spec_steps": self._num_steps, "verify_window": self._config.verify_window}
        verdict = ops.verify_tree_topp(*links_of(tree), best.tokens, num_kept, own, **sizes)
        return _commit(batch, verdict)

    def keep_likely(self, batch: Batch, proposal: Proposal, logits: Tensor, features: Features) -> Committed:
        """LOSSY at temperatures above 0. Keeps drafts that the target finds likely: Medusa's typical acceptance."""
        tree, temperature = proposal.tree, batch.numbers("temperature")
        epsilon = torch.full_like(temperature, self._config.typical_epsilon)
        delta = torch.full_like(temperature, self._config.typical_delta)
        params = batch.seeds, temperature, epsilon, delta
        logits = penalized(batch, tree, logits, features)
        verdict = ops.verify_tree_typical(*links_of(tree), logits, tree.positions, *params, spec_steps=self._num_steps)
        return _commit(batch, verdict)

    def reject(self, batch: Batch, proposal: Proposal, logits: Tensor, features: Features) -> Committed:
        """Keeps a draft drawn from the draft model's distribution with probability min(1, target / draft), recursively.
        The token after a rejection is drawn from what is left of the target's distribution. Drafts that were chosen,
        not drawn, count as drawn with probability 1."""
        tree, temperature = proposal.tree, batch.numbers("temperature")
        logits = penalized(batch, tree, logits, features)
        target: dict[str, Tensor | None] = {"target_logits": logits}
        if features.filters:
            target = {"target_logits": None, "target_probs": _filtered(logits, *_params_of_nodes(batch, proposal))}
        drawn_at, draft_logits = temperature, proposal.draft_logits
        if draft_logits is None:
            # drafts were chosen: the op reads no draft logits, so any will do
            drawn_at, draft_logits = torch.zeros_like(temperature), logits
        verdict = ops.verify_tree_rejection(
            *links_of(tree), **target, draft_logits=draft_logits, positions=tree.positions, seeds=batch.seeds,
            temperature=temperature, draft_temperature=drawn_at, spec_steps=self._num_steps,
            d2t=None if proposal.draft_logits is None else proposal.draft_to_target,
        )  # fmt: skip
        return _commit(batch, verdict)


def _params_of_nodes(batch: Batch, proposal: Proposal) -> tuple[Tensor, ...]:
    """Returns seed, temperature, top_k, top_p and min_p of each node's request: [B * N]."""
    of_rows = batch.seeds, *map(batch.numbers, ("temperature", "top_k", "top_p", "min_p"))
    return tuple(each.repeat_interleave(proposal.tree.retrieve_index.shape[1]) for each in of_rows)


def _filtered(
    logits: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the target's probabilities after the filters, in plain decoding's order; 1 for the argmax if greedy."""
    is_greedy = temperature[:, None] < GREEDY_TEMPERATURE
    probs = torch.softmax(logits.float() / torch.where(is_greedy, 1.0, temperature[:, None]), dim=-1)
    probs = ops.min_p_renorm(ops.top_p_renorm(ops.top_k_renorm(probs, top_k), top_p), min_p)
    best = ops.sample_from_logits(logits, seeds, seeds, torch.zeros_like(temperature))[:, None]
    return torch.where(is_greedy, torch.zeros_like(probs).scatter_(1, best, 1.0), probs)


def penalized(batch: Batch, tree: ops.BuildTreeOutput, logits: Tensor, features: Features) -> Tensor:
    """Returns the target's logits with the requests' penalties, counting the drafts on each node's path as output."""
    if not features.penalties:
        return logits
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_mask", "output_counts")
    given = batch.sampling_arguments(features)
    return ops.penalize_logits(*links_of(tree), logits, **{name: given[name] for name in names})


def without_early_ends(batch: Batch, tree: ops.BuildTreeOutput, logits: Tensor, features: Features) -> Tensor:
    """Returns the target's logits without the end tokens of nodes that come before a request's min_new_tokens."""
    if not features.minimum:
        return logits
    return ops.penalize_logits(*links_of(tree), logits, **batch.state.sampling.early_ends(batch.rows, batch.lengths))


def links_of(tree: ops.BuildTreeOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the candidates and links of the trees, as the verification ops take them."""
    candidates = tree.draft_tokens.view_as(tree.retrieve_index)
    return candidates, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling


def _commit(batch: Batch, verdict: tuple[Tensor, ...]) -> Committed:
    """Adds what follows from a verdict, whose first fields are predicts, accept_index and accept_token_num."""
    commit = ops.verify_commit(*verdict[:3], batch.lengths, batch.is_live)
    commit = {name: getattr(commit, name) for name in Committed._fields if name in commit._fields}
    return Committed(*verdict[1:3], **commit)
