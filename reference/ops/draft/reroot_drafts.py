"""Reference of reroot_drafts: down the path, then one node after another behind its new parent."""

import torch

from .merge_drafts import Output, drafts_of


def reroot_drafts(
    tokens: torch.Tensor, parents: torch.Tensor, path: torch.Tensor, *, num_speculative_tokens: int, spec_steps: int
) -> Output:
    """See eagle_kernels/ops/draft/reroot_drafts.py."""
    tries = []
    for rows in zip(tokens.tolist(), parents.tolist(), path.tolist()):
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
        tries.append(kept)
    return Output(*drafts_of(tries, num_speculative_tokens, tokens.device))


def _trie(tokens: list[int], parents: list[int]) -> list[tuple[int, int, int]]:
    """(node, token, parent) of the nodes that exist: their parents do, and precede them."""
    known, trie = {0}, []
    for node, (token, parent) in enumerate(zip(tokens, parents), start=1):
        if parent in known and token >= 0:
            known.add(node)
            trie.append((node, token, parent))
    return trie
