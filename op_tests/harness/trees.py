"""Trees by their parents, and random ones in the form that drafting produces them."""

import torch

LINKS = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


def trees_of(parents: list[int], tokens: list[list[int]]) -> dict[str, torch.Tensor]:
    """The links of trees of one form, a request for each row of tokens."""
    batch_size, num_nodes = len(tokens), len(parents)
    links = [torch.tensor(link).repeat(batch_size, 1) for link in links_of(parents)]
    index = torch.arange(batch_size * num_nodes).view(batch_size, num_nodes)
    return dict(zip(LINKS, (torch.tensor(tokens, dtype=torch.int64).view(batch_size, num_nodes), index, *links)))


def stars(children: list[list[int]], root: int = 0) -> dict[str, torch.Tensor]:
    """Trees of a root and the children that carry these tokens, the same number in each."""
    return trees_of([-1] + [0] * len(children[0]), [[root, *tokens] for tokens in children])


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    """First children and next siblings of a tree's nodes, -1 for none; the root and padding have the parent -1."""
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        if parents[node] >= 0:
            next_sibling[node] = first_child[parents[node]]
            first_child[parents[node]] = node
    return first_child, next_sibling


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def prefixes_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    prefixes = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        prefixes.append((*prefixes[parent], token))
    return prefixes


def random_drafts(batch_size: int, topk: int, spec_steps: int, num_nodes: int, *, vocab_size: int = 97, device="cpu"):
    """parent_list, top_scores_index, draft_tokens of `batch_size` valid random trees (siblings carry distinct tokens).

    Each level keeps topk random candidates of the level before; the N - 1 kept candidates are closed under parents.
    """
    width = topk * (spec_steps - 1) + 1
    parent_list = torch.full((batch_size, width), -1, dtype=torch.int64)
    top_scores_index = torch.empty(batch_size, num_nodes - 1, dtype=torch.int64)
    draft_tokens = torch.empty(batch_size, num_nodes - 1, dtype=torch.int64)
    for request in range(batch_size):
        for step in range(1, spec_steps):
            first = 0 if step == 1 else topk + topk * topk * (step - 2)
            size = topk if step == 1 else topk * topk
            kept = (first + torch.randperm(size)[:topk]).sort().values if step > 1 else first + torch.arange(topk)
            parent_list[request, 1 + topk * (step - 1) : 1 + topk * step] = kept
        slots = parent_list[request].tolist()
        chosen: set[int] = set()
        total = topk + (spec_steps - 1) * topk * topk
        while len(chosen) < num_nodes - 1:
            ready = [c for c in range(total) if c not in chosen and (c < topk or slots[c // topk] in chosen)]
            chosen.add(ready[int(torch.randint(len(ready), ()))])
        top_scores_index[request] = torch.tensor(sorted(chosen), dtype=torch.int64)
        tokens: dict[int, list[int]] = {}
        for index, candidate in enumerate(sorted(chosen)):
            used = tokens.setdefault(candidate // topk, [])
            token = int(torch.randint(vocab_size, ()))
            while token in used:
                token = (token + 1) % vocab_size
            used.append(token)
            draft_tokens[request, index] = token
    return parent_list.to(device), top_scores_index.to(device), draft_tokens.to(device)
