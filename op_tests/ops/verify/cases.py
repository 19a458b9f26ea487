"""Inputs of verification: random trees, target logits that follow them for a while, arguments of whole ops."""

import torch

from eagle_kernels.reference.ops.tree.build_tree import build_tree
from op_tests.harness.trees import LINKS, random_drafts


def make_tree(batch_size, topk, spec_steps, num_nodes, *, vocab_size=97, dtype=torch.int64, device="cpu"):
    """The four link tensors [B, N] and positions [B * N] of random trees."""
    parent_list, top_scores_index, draft_tokens = random_drafts(
        batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size
    )
    tree = build_tree(
        torch.randint(vocab_size, (batch_size,)), parent_list, top_scores_index, draft_tokens,
        torch.randint(0, 50, (batch_size,)), topk=topk, spec_steps=spec_steps, num_verify_tokens=num_nodes,
    )  # fmt: skip
    candidates = tree.draft_tokens.view(batch_size, num_nodes)
    links = dict(zip(LINKS, (candidates, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)))
    return {key: value.to(device=device, dtype=dtype) for key, value in links.items()}, tree.positions.to(device)


def follow_tree(links: dict, vocab_size: int, *, peak: float = 4.0, dtype=torch.float32) -> torch.Tensor:
    """Target logits [B * N, V] on a coarse dyadic grid that favour, at every node, one random child's token."""
    batch_size, num_nodes = links["candidates"].shape
    logits = torch.randint(-8, 8, (batch_size * num_nodes, vocab_size)) / 4.0
    candidates, _, first, sibling = (links[name].cpu() for name in LINKS)
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


def make_logits(num_rows, vocab_size, *, dtype=torch.float32, device="cpu", temperature=None, **filters):
    temperatures = torch.tensor([0.0, 0.5, 0.8, 1.0, 1.7])[torch.arange(num_rows) % 5]
    if temperature is not None:
        temperatures.fill_(temperature)
    values = {
        "logits": (3.0 * torch.randn(num_rows, vocab_size)).to(dtype),
        "positions": torch.randint(0, 2**31 - 1, (num_rows,)),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,)),
        "temperature": temperatures,
    }
    for name, value in filters.items():
        values[name] = torch.full((num_rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
    return {key: value.to(device) for key, value in values.items()}


def padded(logits: torch.Tensor) -> torch.Tensor:
    """Returns the same rows, which begin at multiples of 64 elements, as those of a padded vocabulary do. Whoever reads
    what lies between them takes it for the largest logit."""
    vocab_size = logits.shape[1]
    return torch.nn.functional.pad(logits, (0, -vocab_size % 64), value=1e4)[:, :vocab_size]


def make_sampled(batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, device="cpu", dtype=torch.float32,
                 **filters):  # fmt: skip
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, device=device)
    values = {
        **links,
        "target_logits": follow_tree(links, vocab_size, peak=6.0, dtype=dtype),
        "positions": positions,
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,), device=device),
        "temperature": torch.tensor([0.8, 0.0, 1.0, 1.3], device=device).repeat(batch_size)[:batch_size].contiguous(),
        "spec_steps": spec_steps,
    }
    for name, value in filters.items():
        dtype = torch.int64 if name == "top_k" else torch.float32
        values[name] = torch.full((batch_size,), value, dtype=dtype, device=device)
    return values


def with_processors(values: dict, *, penalties: bool = True) -> dict:
    """The same trees with a bias and a grammar that forbids every eighth token, and penalties; all on a dyadic grid."""
    device, (batch_size, num_nodes) = values["candidates"].device, values["candidates"].shape
    vocab_size = values["target_logits"].shape[1]
    words = torch.randint(-(2**31), 2**31, (3, batch_size * num_nodes, -(-vocab_size // 32)))
    request = torch.arange(batch_size)
    made = {
        "logit_bias": torch.randint(-4, 5, (batch_size, vocab_size)) / 4.0,
        "token_bitmask": (words[0] | words[1] | words[2]).to(torch.int32),
    }
    if penalties:
        made |= {
            "repetition_penalty": torch.tensor([1.25, 1.0, 2.0])[request % 3],
            "frequency_penalty": torch.tensor([0.25, 0.5])[request % 2],
            "presence_penalty": torch.tensor([0.0, 1.0, 0.5, -0.25])[request % 4],
            "prompt_mask": words[1, :batch_size].to(torch.int32),
            "output_counts": torch.randint(0, 3, (batch_size, vocab_size), dtype=torch.int32),
        }
    return values | {name: value.to(device) for name, value in made.items()}
