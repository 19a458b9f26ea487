"""Reference of share_drafts: one node after another into a dictionary of children, then the best by a stable sort."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    num_drafts: torch.Tensor


def share_drafts(
    tokens: torch.Tensor, parents: torch.Tensor, probs: torch.Tensor, factors: torch.Tensor | None = None,
    *, num_speculative_tokens: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/draft/share_drafts.py."""
    (batch_size, num_drafters, _), most, device = tokens.shape, num_speculative_tokens, tokens.device
    kept_tokens, kept_parents = (torch.full((batch_size, most), -1, device="cpu") for _ in range(2))
    kept_scores = torch.zeros(batch_size, most, dtype=torch.float32, device="cpu")
    kept_probs = torch.zeros(batch_size, num_drafters, most, dtype=torch.float32, device="cpu")
    num_drafts = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    if factors is None:
        factors = torch.ones(num_drafters, 1, dtype=torch.float32, device="cpu")
    for request, tries in enumerate(zip(tokens.tolist(), parents.tolist(), probs.tolist())):
        trie, said = _merge(zip(*tries), num_drafters)
        scores = _scores(trie, said, factors.cpu())
        order = torch.sort(scores, descending=True, stable=True).indices[:most].tolist()
        numbers = {0: 0}
        for node in sorted(node for node in order if scores[node] > 0):
            token, parent = trie[node]
            place = len(numbers) - 1
            kept_tokens[request, place], kept_parents[request, place] = token, numbers[parent]
            kept_scores[request, place], kept_probs[request, :, place] = scores[node], said[node]
            numbers[node + 1] = place + 1
        num_drafts[request] = len(numbers) - 1
    return Output(*(each.to(device) for each in (kept_tokens, kept_parents, kept_scores, kept_probs, num_drafts)))


def _merge(tries, num_drafters: int) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Returns (token, parent) of the nodes of all tries in one, and what each drafter said of each: [nodes, P]."""
    children: dict[tuple[int, int], int] = {}
    said: list[list[float]] = []
    for drafter, trie in enumerate(tries):
        moved = {0: 0}
        for node, (token, parent, prob) in enumerate(zip(*trie), start=1):
            if parent not in moved or token < 0 or not prob > 0:
                continue
            moved[node] = children.setdefault((moved[parent], token), len(children) + 1)
            if len(said) < len(children):
                said.append([0.0] * num_drafters)
            known = said[moved[node] - 1]
            known[drafter] = max(known[drafter], min(prob, 1.0))
    values = torch.tensor(said, dtype=torch.float32, device="cpu").view(len(said), num_drafters)
    return [(token, parent) for parent, token in children], values


def _scores(trie: list[tuple[int, int]], said: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns the value of each node with all above it: the product of the best that any drafter promises."""
    scores, depths = torch.ones(1 + len(trie), dtype=torch.float32, device="cpu"), [0]
    for node, ((_, parent), of_node) in enumerate(zip(trie, said), start=1):
        depths.append(depths[parent] + 1)
        promised = of_node * factors[:, min(depths[node], factors.shape[1]) - 1]
        best = torch.where(promised > 0, promised, 0.0).amax().clamp(max=1)
        scores[node] = scores[parent] * best
    return scores[1:]
