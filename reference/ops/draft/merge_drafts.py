"""Reference of merge_drafts: one node after another into a dictionary of children."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor


def merge_drafts(
    tokens: torch.Tensor, parents: torch.Tensor, other_tokens: torch.Tensor, other_parents: torch.Tensor,
    attach: torch.Tensor,
    *, num_speculative_tokens: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/draft/merge_drafts.py."""
    merged_tokens = torch.full((len(tokens), num_speculative_tokens), -1, device="cpu")
    merged_parents = torch.full_like(merged_tokens, -1)
    num_drafts = torch.zeros(len(tokens), dtype=torch.int32, device="cpu")
    rows = zip(*(tensor.tolist() for tensor in (tokens, parents, other_tokens, other_parents, attach)))
    for request, (first_tokens, first_parents, next_tokens, next_parents, root) in enumerate(rows):
        children: dict[tuple[int, int], int] = {}
        moved = _insert(first_tokens, first_parents, 0, children, num_speculative_tokens)
        if root in moved:
            _insert(next_tokens, next_parents, moved[root], children, num_speculative_tokens)
        num_drafts[request] = len(children)
        for (parent, token), node in children.items():
            merged_tokens[request, node - 1], merged_parents[request, node - 1] = token, parent
    return Output(*(tensor.to(tokens.device) for tensor in (merged_tokens, merged_parents, num_drafts)))


def _insert(
    tokens: list[int], parents: list[int], root: int, children: dict[tuple[int, int], int], most: int
) -> dict[int, int]:
    """Where the nodes of a trie are in the merged one, whose nodes by (parent, token) are `children`."""
    moved = {0: root}
    for node, (token, parent) in enumerate(zip(tokens, parents), start=1):
        if parent not in moved or token < 0:
            continue
        key = moved[parent], token
        if key not in children and len(children) < most:
            children[key] = len(children) + 1
        if key in children:
            moved[node] = children[key]
    return moved
