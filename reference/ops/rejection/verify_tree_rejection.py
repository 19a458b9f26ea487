"""Reference of verify_tree_rejection: the recursion of the papers, one child after the other.

Uniforms are only compared with `<`, and tokens drawn by `choose`, so that a test can hand in draws that have no value
yet and have every outcome enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...residual import GREEDY_BELOW, Draws, given_probs, probs_of_logits
from ...sampling import scaled_logits
from ...tree import Output


def verify_tree_rejection(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    draft_temperature: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    spec_steps: int,
    replacement: bool = False,
) -> Output:
    """See eagle_kernels/ops/rejection/verify_tree_rejection.py."""
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    if target_probs is None:
        target = probs_of_logits(target_logits, temperature.repeat_interleave(num_nodes)).to(torch.float64).cpu()
    else:
        target = given_probs(target_probs).to(torch.float64).cpu()
    scores = _scores(draft_logits, draft_probs, draft_temperature.repeat_interleave(num_nodes)).cpu()
    scores = _by_target_id(scores, None if d2t is None else d2t.cpu(), target.shape[1])
    target = torch.nn.functional.pad(target, (0, scores.shape[1] - target.shape[1]))
    is_certain = (~(draft_temperature >= GREEDY_BELOW)).tolist()

    predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32, device="cpu")
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32, device="cpu")
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    tokens, retrieved = candidates.tolist(), retrieve_index.tolist()
    first_child, next_sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for request in range(batch_size):
        first = request * num_nodes
        own = range(first, first + num_nodes)
        if retrieved[request][0] not in own:
            continue
        is_own = [index in own for index in retrieved[request]]
        path, bonus = verify_request(
            # a node of another request ends the list it is met in
            [token if own_node else -1 for token, own_node in zip(tokens[request], is_own)],
            first_child[request],
            [sibling if own_node else -1 for sibling, own_node in zip(next_sibling[request], is_own)],
            positions[first : first + num_nodes].tolist(),
            target_at=lambda node, first=first: target[first + node],
            scores_at=lambda node, first=first: scores[first + node],
            children_are_certain=is_certain[request] and not replacement,
            spec_steps=spec_steps,
            replacement=replacement,
            draws=Draws(int(seeds[request])),
        )
        emitted = [tokens[request][node] for node in path[1:]] + [bonus]
        for depth, (node, token) in enumerate(zip(path, emitted)):
            accept_index[request, depth] = retrieved[request][node]
            predicts[request, node] = token
        accept_token_num[request] = len(path) - 1
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))


def verify_request(
    tokens: Sequence[int],
    first_child: Sequence[int],
    next_sibling: Sequence[int],
    positions: Sequence[int],
    *,
    target_at: Callable[[int], torch.Tensor],
    scores_at: Callable[[int], torch.Tensor],
    children_are_certain: bool = False,
    spec_steps: int,
    replacement: bool,
    draws: Draws,
) -> tuple[list[int], int]:
    """Returns the accepted nodes of one tree, root first, and the bonus token.

    target_at: a node's row of target probabilities [V].
    scores_at: logarithms [V] of weights that the node's children were drawn by.
    children_are_certain: they were not drawn; each is proposed with probability 1 and the scores are not used.
    draws: `uniform(position, child)`, of which `<` alone is asked, and `choose(probs, position)`.
    """
    path = [0]
    while True:
        node = path[-1]
        target, scores = target_at(node), scores_at(node)
        if len(path) > spec_steps:
            break
        for child in children(first_child, next_sibling, node):
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


def children(first_child: Sequence[int], next_sibling: Sequence[int], node: int) -> Iterator[int]:
    """Returns the children of a node in sibling order, until a link does not point forward within the tree."""
    child, after = first_child[node], node
    while after < child < len(first_child):
        yield child
        child, after = next_sibling[child], child


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
