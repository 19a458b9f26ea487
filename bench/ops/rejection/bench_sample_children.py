"""sample_children for one level of a tree, a row for every beam; the order of the best tokens is all but decided."""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, VOCABULARY, of_vocabulary

# of a level: the root alone, and all beams
_ROWS = {topk: sorted({batch_size * beams for batch_size in (1, 8, 32) for beams in (1, topk)}) for topk in (4, 8)}

KINDS = ["without", "with"]
CASES = [
    *(
        {"rows": rows, "num_children": topk, "replacement": kind, "vocab_size": VOCABULARY}
        for kind in KINDS
        for topk in _ROWS
        for rows in _ROWS[topk]
    ),
    *grid(rows=4 * ODD_BATCH, num_children=4, replacement=KINDS, vocab_size=LARGE_VOCABULARY),
]
SMALL_CASES = grid(rows=3, num_children=4, replacement=KINDS, vocab_size=300)


def name(rows, num_children, replacement, vocab_size):
    return f"rows={rows} K={num_children} {replacement} replacement{of_vocabulary(vocab_size)}"


def is_checked(rows, **others):
    return rows <= 64


def make(device, rows, num_children, replacement, vocab_size):
    logits = torch.empty(rows, vocab_size, dtype=torch.bfloat16, device=device).normal_()
    # draws of different generators differ: only a decided outcome can be compared; no provider is faster for it
    winners = torch.argsort(torch.rand(rows, vocab_size, device=device), dim=1)[:, :num_children]
    leads = 24.0 * torch.arange(num_children, 0, -1, dtype=torch.bfloat16, device=device)
    return {
        "draft_logits": logits.scatter_(1, winners, leads.expand(rows, -1)),
        "positions": torch.randint(4096, (rows,), device=device),
        "seeds": torch.randint(2**60, (rows,), device=device),
        "temperature": torch.ones(rows, device=device),
        "nodes": torch.arange(rows, device=device),
        "num_children": num_children,
        "replacement": replacement == "with",
    }


def count_bytes(rows, num_children, replacement, vocab_size):
    return rows * vocab_size * 2


def prepare_torch(values):
    """Softmax, and an exponential race whose first ones are the children; or an independent race for each child."""
    num_children = values["num_children"]

    def run():
        logprobs = torch.log_softmax(values["draft_logits"].float() / values["temperature"][:, None], dim=-1)
        probs = logprobs.exp()
        if values["replacement"]:
            tokens = torch.multinomial(probs, num_children, replacement=True)
        else:
            tokens = (logprobs - torch.empty_like(probs).exponential_().log()).topk(num_children, dim=-1).indices
        return {"tokens": tokens, "logprobs": logprobs.gather(1, tokens)}

    return run
