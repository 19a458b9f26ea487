"""Inputs that the verification tests share: random trees, with target logits that follow them for a while."""

from __future__ import annotations

import torch

from eagle_kernels.reference.ops.tree.build_tree import build_tree
from op_tests.harness.trees import random_drafts


def make_tree(batch_size, topk, spec_steps, num_nodes, *, vocab_size=97, dtype=torch.int64, device="cpu"):
    """The four link tensors [B, N] and positions [B * N] of random trees."""
    parent_list, top_scores_index, draft_tokens = random_drafts(
        batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size
    )
    tree = build_tree(
        torch.randint(vocab_size, (batch_size,)), parent_list, top_scores_index, draft_tokens,
        torch.randint(0, 50, (batch_size,)), topk=topk, spec_steps=spec_steps, num_verify_tokens=num_nodes,
    )  # fmt: skip
    links = {
        "candidates": tree.draft_tokens.view(batch_size, num_nodes),
        "retrieve_index": tree.retrieve_index,
        "retrieve_next_token": tree.retrieve_next_token,
        "retrieve_next_sibling": tree.retrieve_next_sibling,
    }
    return {key: value.to(device=device, dtype=dtype) for key, value in links.items()}, tree.positions.to(device)


def follow_tree(links: dict, vocab_size: int, *, peak: float = 4.0, dtype=torch.float32) -> torch.Tensor:
    """Target logits [B * N, V] on a coarse dyadic grid that favour, at every node, one random child's token."""
    batch_size, num_nodes = links["candidates"].shape
    logits = torch.randint(-8, 8, (batch_size * num_nodes, vocab_size)) / 4.0
    names = ("candidates", "retrieve_next_token", "retrieve_next_sibling")
    candidates, first, sibling = (links[name].cpu() for name in names)
    for request in range(batch_size):
        for node in range(num_nodes):
            child = int(first[request, node])
            while child >= 0 and int(sibling[request, child]) >= 0 and bool(torch.rand(()) < 0.5):
                child = int(sibling[request, child])
            if child >= 0:
                logits[request * num_nodes + node, int(candidates[request, child]) % vocab_size] += peak
    return logits.to(device=links["candidates"].device, dtype=dtype)


# What a caller may hand in by mistake; every op must end, stay in bounds and accept none of it.
MALFORMED = {
    "self loops": lambda links: links["retrieve_next_token"].copy_(
        torch.arange(links["candidates"].shape[1]).expand_as(links["candidates"])
    ),
    "sibling cycle": lambda links: links["retrieve_next_sibling"].fill_(1),
    "links past the tree": lambda links: links["retrieve_next_token"].fill_(2**20),
    "backward links": lambda links: links["retrieve_next_token"].fill_(0),
    "tokens of -1": lambda links: links["candidates"].fill_(-1),
    "out-of-vocabulary tokens": lambda links: links["candidates"].fill_(2**30),
    "dead rows": lambda links: [links[key].fill_(-1) for key in links],
    "rows of another request": lambda links: links["retrieve_index"].copy_(links["retrieve_index"].flip(0)),
    "children of another request": lambda links: links["retrieve_index"][:, 1:].add_(links["candidates"].numel()),
}
