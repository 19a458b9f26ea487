"""Reference of verify_tree_rejection: the recursion of the papers, one child after the other.

Uniforms are only compared with `<`, and tokens drawn by `choose`, so that a test can hand in draws that have no value
yet and have every outcome enumerated.
"""

from collections.abc import Callable, Sequence

import torch

from ...residual import GREEDY_BELOW, Draws, given_probs, probs_of_logits
from ...sampling import scaled_logits
from ...tree import Output, children_in, trees, write_paths


def verify_tree_rejection(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor | None, draft_logits: torch.Tensor | None,
    positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor,
    draft_temperature: torch.Tensor | None = None, target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None, d2t: torch.Tensor | None = None,
    *, spec_steps: int, replacement: bool = False,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/rejection/verify_tree_rejection.py."""
    num_nodes = candidates.shape[1]
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    if target_probs is None:
        target = probs_of_logits(target_logits, temperature.repeat_interleave(num_nodes)).to(torch.float64).cpu()
    else:
        target = given_probs(target_probs).to(torch.float64).cpu()
    scores = _scores(draft_logits, draft_probs, draft_temperature.repeat_interleave(num_nodes)).cpu()
    scores = _by_target_id(scores, None if d2t is None else d2t.cpu(), target.shape[1])
    target = torch.nn.functional.pad(target, (0, scores.shape[1] - target.shape[1]))
    is_certain = (~(draft_temperature >= GREEDY_BELOW)).tolist()

    tree_of = trees(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)

    def verified(request: int) -> tuple[list[int], int]:
        rows = slice(request * num_nodes, (request + 1) * num_nodes)
        return verify_request(
            *tree_of(request), positions[rows].tolist(), target_at=lambda node: target[rows][node],
            scores_at=lambda node: scores[rows][node], spec_steps=spec_steps, replacement=replacement,
            children_are_certain=is_certain[request] and not replacement, draws=Draws(int(seeds[request])),
        )  # fmt: skip

    return write_paths(candidates, retrieve_index, spec_steps, verified)


def verify_request(
    tokens: Sequence[int], first_child: Sequence[int], next_sibling: Sequence[int], positions: Sequence[int],
    *, target_at: Callable[[int], torch.Tensor], scores_at: Callable[[int], torch.Tensor],
    children_are_certain: bool = False, spec_steps: int, replacement: bool, draws: Draws,
) -> tuple[list[int], int]:  # fmt: skip
    """Returns the accepted nodes of one tree, root first, and the bonus token.
    target_at: a node's row of target probabilities [V].
    scores_at: logarithms [V] of weights that the node's children were drawn by.
    children_are_certain: they were not drawn; each is proposed with probability 1 and the scores are not used.
    draws: `uniform(position, child)`, of which `<` alone is asked, and `choose(probs, position)`."""
    path = [0]
    while True:
        node = path[-1]
        target, scores = target_at(node), scores_at(node)
        if len(path) > spec_steps:
            break
        for child in children_in(first_child, next_sibling, node):
            token = tokens[child]
            if not 0 <= token < len(target):
                continue
            draft = one_hot(target, token) if children_are_certain else normalised(scores)
            if not draft[token] > 0:
                break
            if draws.uniform(positions[child], child) < target[token] / draft[token]:
                path.append(child)
                break
            left = (target - draft).clamp(min=0)
            if left.sum() > 0:
                target = left / left.sum()
            elif target[token] > 0:
                path.append(child)
                break
            if not replacement:
                scores = without(scores, token)
        if path[-1] == node:
            break
    return path, draws.choose(target, positions[node] + 1)


def normalised(scores: torch.Tensor) -> torch.Tensor:
    """Returns probabilities of scores, all 0 where none is above -inf."""
    return torch.softmax(scores, dim=0).nan_to_num(0.0)


def without(scores: torch.Tensor, token: int) -> torch.Tensor:
    """Returns the scores of a distribution that cannot draw the token any more."""
    left = scores.clone()
    left[token] = float("-inf")
    return left


def one_hot(like: torch.Tensor, token: int) -> torch.Tensor:
    probs = torch.zeros_like(like)
    probs[token] = 1.0
    return probs


def _scores(logits: torch.Tensor | None, probs: torch.Tensor | None, temperature: torch.Tensor) -> torch.Tensor:
    """Returns logarithms float64 [B * N, Vd] of the weights of draft tokens, so that no token's weight underflows."""
    if logits is None:
        return given_probs(probs).to(torch.float64).log()
    scaled = scaled_logits(logits, temperature).to(torch.float64)
    one_hot_scores = probs_of_logits(logits, torch.zeros_like(temperature)).to(torch.float64).log()
    return torch.where((temperature >= GREEDY_BELOW)[:, None], scaled, one_hot_scores)


def _by_target_id(scores: torch.Tensor, d2t: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Returns scores [B * N, V or more] of target ids; -inf for tokens that drafting cannot draw."""
    num_rows, num_drafts = scores.shape
    if d2t is None:
        return torch.nn.functional.pad(scores, (0, max(vocab_size - num_drafts, 0)), value=float("-inf"))
    wide = torch.full((num_rows, vocab_size), float("-inf"), dtype=scores.dtype, device="cpu")
    wide[:, torch.arange(num_drafts, device="cpu") + d2t.to(torch.int64)] = scores
    return wide
