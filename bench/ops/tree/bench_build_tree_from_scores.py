"""build_tree_from_scores next to the two ops that it joins, and to their torch forms."""

import torch

import eagle_kernels
from bench.harness import grid
from bench.harness.inputs import TREES, VOCABULARY

CASES = grid(tree=TREES, batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, tree=TREES[0])

name = "{tree} B={batch_size}".format


def make(device, batch_size, tree):
    topk, spec_steps, num_nodes = tree
    num_candidates = topk + (spec_steps - 1) * topk * topk
    # distinct scores that fall from level to level: parents come before their children
    order = torch.arange(num_candidates, device=device) + torch.rand(batch_size, num_candidates, device=device)
    beams = [torch.arange(topk, device=device) + topk + (level - 1) * topk * topk for level in range(1, spec_steps - 1)]
    first = [torch.arange(topk, device=device)] if spec_steps > 1 else []
    slots = torch.cat([torch.full((1,), -1, device=device), *first, *beams])
    return {
        "verified_id": torch.randint(VOCABULARY, (batch_size,), device=device),
        "candidate_scores": -order / 16,
        "candidate_tokens": torch.randint(VOCABULARY, (batch_size, num_candidates), device=device),
        "parent_list": slots.expand(batch_size, -1).contiguous(),
        "seq_lens": torch.randint(1, 1000, (batch_size,), device=device),
        "topk": topk,
        "spec_steps": spec_steps,
        "num_verify_tokens": num_nodes,
    }


def count_bytes(batch_size, tree):
    topk, spec_steps, num_nodes = tree
    num_candidates, width = topk + (spec_steps - 1) * topk * topk, topk * (spec_steps - 1) + 1
    return batch_size * (4 * num_candidates + 8 * (2 * num_nodes + width + num_nodes * 7))


def prepare_pipeline(values):
    """Two launches of ours."""
    shared = {key: value for key, value in values.items() if not key.startswith("candidate_")}
    candidates = (values["candidate_scores"], values["candidate_tokens"])
    num_nodes = values["num_verify_tokens"]
    best = eagle_kernels.raw.organize_draft_results(*candidates, num_verify_tokens=num_nodes)
    kept = best._asdict()
    tree = eagle_kernels.raw.build_tree(**shared, **kept)

    def run():
        eagle_kernels.raw.organize_draft_results(*candidates, num_verify_tokens=num_nodes, out=best)
        return eagle_kernels.raw.build_tree(**shared, **kept, out=tree)._asdict()

    return run


def prepare_torch(values):
    """Ranking in torch, the tree by our kernel."""
    shared = {key: value for key, value in values.items() if not key.startswith("candidate_")}
    num_kept = values["num_verify_tokens"] - 1

    def run():
        kept = values["candidate_scores"].topk(num_kept).indices.sort().values
        tokens = values["candidate_tokens"].gather(1, kept)
        return eagle_kernels.raw.build_tree(**shared, top_scores_index=kept, draft_tokens=tokens)._asdict()

    return run
