"""organize_draft_results over tree sizes and batch sizes."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import TREES, VOCABULARY
from bench.run import main


def make(device, batch_size, num_candidates, num_nodes):
    # distinct scores: torch.topk orders ties as it likes
    order = torch.rand(batch_size, num_candidates, device=device).argsort(dim=1)
    return {
        "candidate_scores": -order.float() / 16,
        "candidate_tokens": torch.randint(VOCABULARY, (batch_size, num_candidates), device=device),
        "num_verify_tokens": num_nodes,
    }


def count_bytes(batch_size, num_candidates, num_nodes):
    return batch_size * (4 * num_candidates + 24 * (num_nodes - 1))


def prepare_torch(values):
    num_kept = values["num_verify_tokens"] - 1

    def run():
        kept = values["candidate_scores"].topk(num_kept).indices.sort().values
        return {"top_scores_index": kept, "draft_tokens": values["candidate_tokens"].gather(1, kept)}

    return run


def _case(batch_size, tree):
    topk, spec_steps, num_nodes = tree
    sizes = {"num_candidates": topk + (spec_steps - 1) * topk * topk, "num_nodes": num_nodes}
    return Case(f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size}", {"batch_size": batch_size} | sizes)


BENCHMARK = Benchmark(
    path="tree.organize_draft_results",
    cases=[_case(batch_size, tree) for tree in TREES for batch_size in (1, 8, 32, 128)],
    small_cases=[_case(2, (4, 3, 8))],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
