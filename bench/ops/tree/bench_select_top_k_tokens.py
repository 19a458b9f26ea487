"""select_top_k_tokens on draft logits of both usual vocabulary sizes."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.run import main

TOPK = 8
LEVEL = 2


def make(device, batch_size, vocab_size):
    ancestors = torch.randint(2 ** (LEVEL * TOPK), (batch_size, TOPK, 1), device=device)
    return {
        "logits": torch.randn(batch_size * TOPK, vocab_size, device=device).to(torch.bfloat16),
        "scores": torch.rand(batch_size, TOPK, device=device).log().sort(descending=True).values,
        "ancestors": ancestors,
        "topk": TOPK,
        "level": LEVEL,
    }


def count_bytes(batch_size, vocab_size):
    return batch_size * TOPK * vocab_size * 2


def prepare_torch(values):
    """torch.topk orders ties as it likes, so tokens and what follows from them are computed but not compared."""
    logits, scores, ancestors = values["logits"], values["scores"], values["ancestors"]
    batch_size = len(scores)
    own = torch.ones(TOPK, 1, dtype=torch.int64, device=logits.device)
    own = own << torch.arange(LEVEL * TOPK, (LEVEL + 1) * TOPK, device=logits.device)[:, None]

    def run():
        log_probs, tokens = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(TOPK)
        candidate_scores = (log_probs.view(batch_size, TOPK, TOPK) + scores[:, :, None]).flatten(1)
        kept_scores, kept = candidate_scores.topk(TOPK)
        tokens.view(batch_size, -1).gather(1, kept)
        ancestors.gather(1, (kept // TOPK)[:, :, None]) | own
        return {"scores": kept_scores, "candidate_scores": candidate_scores}

    return run


def _case(batch_size, vocab_size):
    return Case(f"rows={batch_size * TOPK} V={vocab_size}", {"batch_size": batch_size, "vocab_size": vocab_size})


BENCHMARK = Benchmark(
    path="tree.select_top_k_tokens",
    cases=[_case(batch_size, vocab_size) for vocab_size in (32000, 128256) for batch_size in (1, 8, 32)],
    small_cases=[_case(2, 300)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
