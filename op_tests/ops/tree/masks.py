"""Random trees as parents, ancestor masks and links, and masks in every layout; written apart from the references."""

import torch

from op_tests.harness.trees import links_of

MODES = ("packed", "full_mask", "qlen_only", "qlen_only_bitpacking")
WORD_DTYPES = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


def random_parents(batch_size: int, num_nodes: int) -> torch.Tensor:
    """[B, N] a random earlier node each, -1 for the root."""
    parents = torch.full((batch_size, num_nodes), -1)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(node, (batch_size,))
    return parents


def visible_from(parents: torch.Tensor) -> torch.Tensor:
    """bool [B, N, N]: every node sees its ancestors and itself."""
    batch_size, num_nodes = parents.shape
    visible = torch.eye(num_nodes, dtype=torch.bool).repeat(batch_size, 1, 1)
    for request in range(batch_size):
        for node in range(1, num_nodes):
            if parents[request, node] >= 0:
                visible[request, node] |= visible[request, parents[request, node]]
    return visible


def links_from(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """retrieve_next_token and retrieve_next_sibling [B, N], siblings ascending."""
    return tuple(map(torch.tensor, zip(*(links_of(row) for row in parents.tolist()))))


def in_layout(visible: torch.Tensor, seq_lens: torch.Tensor, mode: str) -> torch.Tensor:
    """The truths [B, Nq, Nk] in layout `mode`, one Python integer a row."""
    batch_size, num_rows, num_keys = visible.shape
    if mode == "qlen_only":
        return visible.clone()
    if mode == "full_mask":
        rows = [[True] * length + row for length, block in zip(seq_lens.tolist(), visible.tolist()) for row in block]
        return torch.tensor(sum(rows, []), dtype=torch.bool)
    integers = [sum(1 << key for key, seen in enumerate(row) if seen) for block in visible.tolist() for row in block]
    if mode == "qlen_only_bitpacking":
        bits = next(bits for bits in WORD_DTYPES if num_keys <= bits)
        return torch.tensor(integers).to(WORD_DTYPES[bits]).view(batch_size, num_rows)
    num_words = -(-num_keys // 64)
    signed = [
        ((integer >> 64 * word) & (2**64 - 1)) - 2**64 * ((integer >> 64 * word + 63) & 1)
        for integer in integers
        for word in range(num_words)
    ]
    return torch.tensor(signed, dtype=torch.int64).view(batch_size, num_rows, num_words)
