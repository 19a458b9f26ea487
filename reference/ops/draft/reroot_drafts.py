"""Reference of reroot_drafts: down the path, then one node after another behind its new parent."""

import torch

from .merge_drafts import Output


def reroot_drafts(
    tokens: torch.Tensor, parents: torch.Tensor, path: torch.Tensor, *, num_speculative_tokens: int, spec_steps: int
) -> Output:
    """See eagle_kernels/ops/draft/reroot_drafts.py."""
    new_tokens = torch.full((len(tokens), num_speculative_tokens), -1, device="cpu")
    new_parents = torch.full_like(new_tokens, -1)
    num_drafts = torch.zeros(len(tokens), dtype=torch.int32, device="cpu")
    for request, rows in enumerate(zip(tokens.tolist(), parents.tolist(), path.tolist())):
        trie, committed = _trie(*rows[:2]), rows[2]
        root = 0
        for token in committed:
            if token < 0:
                break
            children = [node for node, its_token, parent in trie if (its_token, parent) == (token, root)]
            root = children[0] if children else None
        number, depth = {root: 0}, {root: 0}
        kept = []
        for node, token, parent in trie:
            if parent in number and depth[parent] < spec_steps and len(kept) < num_speculative_tokens:
                kept.append((token, number[parent]))
                number[node], depth[node] = len(kept), depth[parent] + 1
        num_drafts[request] = len(kept)
        for index, (token, parent) in enumerate(kept):
            new_tokens[request, index], new_parents[request, index] = token, parent
    return Output(*(tensor.to(tokens.device) for tensor in (new_tokens, new_parents, num_drafts)))


def _trie(tokens: list[int], parents: list[int]) -> list[tuple[int, int, int]]:
    """(node, token, parent) of the nodes that exist: their parents do, and precede them."""
    known, trie = {0}, []
    for node, (token, parent) in enumerate(zip(tokens, parents), start=1):
        if parent in known and token >= 0:
            known.add(node)
            trie.append((node, token, parent))
    return trie
