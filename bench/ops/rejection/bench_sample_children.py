"""sample_children for one level of a tree, a row for every beam; the order of the best tokens is all but decided."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, VOCABULARY, of_vocabulary
from bench.run import main


def make(device, rows, num_children, vocab_size, replacement):
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
        "replacement": replacement,
    }


def count_bytes(rows, num_children, vocab_size, replacement):
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


def _case(rows, num_children, replacement=False, vocab_size=VOCABULARY):
    kind = "with" if replacement else "without"
    sizes = {"rows": rows, "num_children": num_children, "vocab_size": vocab_size, "replacement": replacement}
    return Case(
        f"rows={rows} K={num_children} {kind} replacement{of_vocabulary(vocab_size)}", sizes, is_checked=rows <= 64
    )


BENCHMARK = Benchmark(
    path="rejection.sample_children",
    cases=[
        *(
            _case(rows, topk, replacement)
            for replacement in (False, True)
            for topk in (4, 8)
            # the root alone, and all beams of a level
            for rows in sorted({batch_size * beams for batch_size in (1, 8, 32) for beams in (1, topk)})
        ),
        *(_case(4 * ODD_BATCH, 4, replacement, LARGE_VOCABULARY) for replacement in (False, True)),
    ],
    small_cases=[_case(3, 4, replacement, vocab_size=300) for replacement in (False, True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
