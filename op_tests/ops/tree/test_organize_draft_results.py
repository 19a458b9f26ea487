"""organize_draft_results against its reference, and the property that makes its result a tree."""

import pytest
import torch

from op_tests.harness import check_operation, sweep

PATH = "tree.organize_draft_results"

# (batch, candidates, nodes): nothing to choose, chains, everything kept, powers of two and their neighbours
SHAPES = [(2, 1, 1), (1, 1, 2), (3, 5, 6), (3, 264, 64), (2, 264, 60), (1, 256, 129), (1, 257, 256), (2, 712, 33),
          (1, 1808, 64), (1, 1808, 256), (1, 4096, 1024)]  # fmt: skip


def make(batch_size, num_candidates, num_nodes, *, distinct=8, dtype=torch.int64, device="cpu"):
    """Scores of which only `distinct` values differ: most comparisons are ties."""
    return {
        "candidate_scores": -torch.randint(0, distinct, (batch_size, num_candidates), device=device) / 4.0,
        "candidate_tokens": torch.randint(0, 128256, (batch_size, num_candidates), dtype=dtype, device=device),
        "num_verify_tokens": num_nodes,
    }


def ahead_of_time_cases():
    yield "C=264 N=64", make(2, 264, 64)
    yield "C=1808 N=256 int32", make(1, 1808, 256, dtype=torch.int32)
    yield "chain", make(1, 5, 6)


size_sweep = sweep(lambda batch_size: make(batch_size, 264, 64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("distinct", [1, 8, 2**20], ids=["one score", "eight scores", "many scores"])
def test_matches_reference(shape, distinct, device):
    check_operation(PATH, make(*shape, distinct=distinct, device=device), case=f"{shape} {distinct}")


@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_kept_candidates_are_closed_under_parents(topk, device):
    """Scores never grow from parent to child and are full of ties, so only the order by id keeps parents first."""
    batch_size, spec_steps = 4, 4
    parents = torch.full((topk + (spec_steps - 1) * topk * topk,), -1)
    scores = -torch.randint(0, 2, (batch_size, topk)).float()
    expanded = torch.arange(topk)
    for level in range(1, spec_steps):
        first = topk + (level - 1) * topk * topk
        level_parents = expanded.repeat_interleave(topk)
        parents[first : first + topk * topk] = level_parents
        drop = torch.randint(0, 2, (batch_size, topk * topk)).float()
        scores = torch.cat([scores, scores[:, level_parents] - drop], dim=1)
        expanded = first + torch.randperm(topk * topk)[:topk]
    tokens = torch.zeros_like(scores, dtype=torch.int64)
    for num_nodes in (2, min(7, 1 + scores.shape[1]), 1 + scores.shape[1] // 2):
        values = {"candidate_scores": scores.to(device), "candidate_tokens": tokens.to(device)}
        result, _ = check_operation(PATH, values | {"num_verify_tokens": num_nodes}, case=f"N = {num_nodes}")
        for row in result.top_scores_index.tolist():
            assert {int(parents[candidate]) for candidate in row} <= {-1, *row}
