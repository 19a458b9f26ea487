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
    tries = []
    for first_tokens, first_parents, next_tokens, next_parents, root in zip(
        *(tensor.tolist() for tensor in (tokens, parents, other_tokens, other_parents, attach))
    ):
        children: dict[tuple[int, int], int] = {}
        moved = _insert(first_tokens, first_parents, 0, children, num_speculative_tokens)
        if root in moved:
            _insert(next_tokens, next_parents, moved[root], children, num_speculative_tokens)
        tries.append([(token, parent) for parent, token in children])
    return Output(*drafts_of(tries, num_speculative_tokens, tokens.device))


def drafts_of(tries: list[list[tuple[int, int]]], most: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns tokens and parents [B, most] int64, -1 padded, and the number of drafts, of tries of (token, parent)."""
    tokens, parents = (torch.full((len(tries), most), -1, device="cpu") for _ in range(2))
    for request, trie in enumerate(tries):
        for index, (token, parent) in enumerate(trie):
            tokens[request, index], parents[request, index] = token, parent
    num_drafts = torch.tensor(list(map(len, tries)), dtype=torch.int32, device="cpu")
    return tokens.to(device), parents.to(device), num_drafts.to(device)


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
