"""Reference of verify_tree_typical: which nodes are accepted, in float64, then the path to the deepest one."""

import torch

from ...sampling import GREEDY_BELOW, draw_tokens, scaled_logits
from ...tree import Output, children, write_paths


def verify_tree_typical(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor,
    temperature: torch.Tensor, epsilon: torch.Tensor, delta: torch.Tensor,
    *, spec_steps: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/verify_tree_typical.py."""
    num_nodes, vocab_size = candidates.shape[1], target_logits.shape[1]
    children_of = children(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    seeds, temperature, epsilon, delta = (
        value.repeat_interleave(num_nodes) for value in (seeds, temperature, epsilon, delta)
    )
    drawn = draw_tokens(target_logits, positions.to(torch.int64) + 1, seeds, temperature).view(-1, num_nodes).tolist()
    probs = torch.softmax(scaled_logits(target_logits, temperature).double(), dim=-1)
    entropy = torch.special.entr(probs).sum(-1)
    # against the smaller one of both: it is enough to exceed either
    is_likely = (probs > epsilon[:, None]) | (probs > (delta * torch.exp(-entropy))[:, None])
    is_likely = (is_likely & (probs > 0)).view(-1, num_nodes, vocab_size)
    is_greedy = ~(temperature >= GREEDY_BELOW).view(-1, num_nodes)[:, 0]
    tokens = candidates.tolist()

    def verified(request: int) -> tuple[list[int], int]:
        path_to = {0: [0]}
        for node in range(num_nodes):
            path = path_to.get(node, [])
            if not 1 <= len(path) <= spec_steps:
                continue
            below = [(child, tokens[request][child]) for child in children_of(request, node)]
            if is_greedy[request]:
                accepted = [child for child, token in below if token == drawn[request][node]][:1]
            else:
                accepted = [
                    child for child, token in below if 0 <= token < vocab_size and is_likely[request, node, token]
                ]
            for child in accepted:
                path_to.setdefault(child, [*path, child])
        deepest = max(path_to.values(), key=lambda path: (len(path), -path[-1]))
        return deepest, drawn[request][deepest[-1]]

    return write_paths(candidates, retrieve_index, spec_steps, verified)
