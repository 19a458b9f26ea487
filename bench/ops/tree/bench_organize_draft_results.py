"""organize_draft_results over tree sizes and batch sizes."""

import torch

from bench.harness import grid
from bench.harness.inputs import TREES, VOCABULARY

CASES = grid(tree=TREES, batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, tree=TREES[0])

name = "{tree} B={batch_size}".format


def make(device, batch_size, tree):
    num_candidates = tree.topk + (tree.spec_steps - 1) * tree.topk**2
    # distinct scores: torch.topk orders ties as it likes
    order = torch.rand(batch_size, num_candidates, device=device).argsort(dim=1)
    return {
        "candidate_scores": -order.float() / 16,
        "candidate_tokens": torch.randint(VOCABULARY, (batch_size, num_candidates), device=device),
        "num_verify_tokens": tree.num_nodes,
    }


def count_bytes(batch_size, tree):
    num_candidates = tree.topk + (tree.spec_steps - 1) * tree.topk**2
    return batch_size * (4 * num_candidates + 24 * (tree.num_nodes - 1))


def prepare_torch(values):
    num_kept = values["num_verify_tokens"] - 1

    def run():
        kept = values["candidate_scores"].topk(num_kept).indices.sort().values
        return {"top_scores_index": kept, "draft_tokens": values["candidate_tokens"].gather(1, kept)}

    return run
