"""Reference of verify_tree_traversal: one request at a time, from probabilities, with draws that can be replaced."""

from collections.abc import Sequence

import torch

from ...residual import Draws, given_probs, on_target_ids, prob_at, probs_of_logits, ratio, remove, subtract, widened
from ...tree import Output, trees, write_paths


def verify_tree_traversal(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor | None, draft_logits: torch.Tensor | None,
    positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | None,
    draft_temperature: torch.Tensor | None = None, target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None, d2t: torch.Tensor | None = None,
    *, spec_steps: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/rejection/verify_tree_traversal.py."""
    num_nodes = candidates.shape[1]
    if target_probs is None:
        target_probs = probs_of_logits(target_logits, temperature.repeat_interleave(num_nodes))
    if draft_probs is None:
        draft_temperature = temperature if draft_temperature is None else draft_temperature
        draft_probs = probs_of_logits(draft_logits, draft_temperature.repeat_interleave(num_nodes))
    draft_probs = on_target_ids(given_probs(draft_probs), d2t, target_probs.shape[1])
    target_probs = widened(given_probs(target_probs), draft_probs.shape[1])
    tree_of = trees(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)

    def verified(request: int) -> tuple[list[int], int]:
        rows = slice(request * num_nodes, (request + 1) * num_nodes)
        pair = target_probs[rows].cpu(), draft_probs[rows].cpu()
        return verify_request(
            *tree_of(request), *pair, positions[rows].tolist(), Draws(int(seeds[request])), spec_steps
        )

    return write_paths(candidates, retrieve_index, spec_steps, verified)


def verify_request(
    tokens: Sequence[int], first_child: Sequence[int], next_sibling: Sequence[int], target_probs: torch.Tensor,
    draft_probs: torch.Tensor, positions: Sequence[int], draws: Draws, spec_steps: int,
) -> tuple[list[int], int]:  # fmt: skip
    """Returns the accepted nodes of one tree, root first, and the token after them (Weng et al., arXiv 2505.12398).
    target_probs, draft_probs [N, V] by target ids; draft_probs[i] is what the children of node i were drawn from,
    without replacement. draws: `uniform(position, depth * 65536 + node)` is compared with `<` only (with the depth, no
    later round has the key again), `choose(weights, position)` draws a token by weight."""
    target, draft = list(target_probs), list(draft_probs)  # P and Q of every node, as deletions leave them
    acceptance = [1.0] * len(tokens)
    is_entered = [False] * len(tokens)
    path, last, child = [0], 0, first_child[0]  # `last`: the node whose link named `child`
    while True:
        node = path[-1]
        is_child = last < child < len(tokens) and not is_entered[child]
        if is_child and len(path) <= spec_steps and acceptance[node] > 0:
            is_entered[child] = True
            draft_prob = prob_at(draft[node], tokens[child])
            if draft_prob > 0:
                reached = acceptance[node] * ratio(prob_at(target[node], tokens[child]), draft_prob)
                acceptance[child] = min(reached, 1.0)
                path.append(child)
                last, child = child, first_child[child]
            else:  # it cannot have been drawn here
                last, child = child, next_sibling[child]
            continue
        # a leaf, by now
        if len(path) == 1 or draws.uniform(positions[node], (len(path) - 1) * 65536 + node) < acceptance[node]:
            return path, draws.choose(target[node], positions[node] + 1)
        path.pop()
        parent = path[-1]
        target[parent], mass = subtract(target[parent], draft[parent], acceptance[parent])
        draft[parent] = remove(draft[parent], tokens[node])
        divisor = float(mass) + (1.0 - acceptance[parent])
        acceptance[parent] = float(mass) / divisor if divisor > 0 else 1.0
        last, child = node, next_sibling[node]
