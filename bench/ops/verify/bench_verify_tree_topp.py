"""verify_tree_topp along a deepest path of members, and where no draft is one."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import ODD_BATCH, TREES, accepted_tree, parents
from bench.run import main

VOCABULARY = 128256


def make(device, batch_size, topk, spec_steps, num_nodes, num_candidates, is_accepted):
    values = accepted_tree("cpu", batch_size, topk, spec_steps, num_nodes, VOCABULARY)
    del values["positions"]
    # ids that no tree carries, but for the target's own, which is the last of each list
    ids = VOCABULARY + torch.randint(VOCABULARY, (batch_size * num_nodes, num_candidates))
    if is_accepted:
        ids[:, -1] = values["target_predict"].flatten()
    values["candidate_ids"] = ids
    values["candidate_lens"] = torch.full((batch_size * num_nodes,), num_candidates, dtype=torch.int32)
    return {name: value.to(device) for name, value in values.items()} | {"spec_steps": spec_steps}


def count_bytes(batch_size, topk, spec_steps, num_nodes, num_candidates, is_accepted):
    """The words and candidates of the visited nodes, and the outputs."""
    visited = spec_steps + 1 if is_accepted else 1
    words = 8 * (4 * visited + 1) + (8 * num_candidates + 4) * visited + 4 * (num_nodes + spec_steps + 2)
    return batch_size * words


def prepare_torch(values):
    """Membership of all nodes at once, without the window; parents and the ancestor mask are made once."""
    candidates, spec_steps = values["candidates"], values["spec_steps"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    parent = parents(values["retrieve_next_token"], values["retrieve_next_sibling"]).to(device)
    node, request = torch.arange(num_nodes, device=device), torch.arange(batch_size, device=device)
    visible = torch.eye(num_nodes, dtype=torch.bool, device=device).expand(batch_size, -1, -1).clone()
    for child in range(1, num_nodes):
        visible[:, child] |= visible[request, parent[:, child]]
    depth = visible.sum(-1) - 1
    above = parent.clamp(min=0)
    rank = torch.arange(values["candidate_ids"].shape[1], device=device)

    def run():
        in_list = rank < values["candidate_lens"].view(batch_size, num_nodes, 1)
        ids = torch.where(in_list, values["candidate_ids"].view(batch_size, num_nodes, -1), -1)
        is_member = (ids[request[:, None], above] == candidates[..., None]).any(-1)
        is_member[:, 0] = True
        is_accepted = (is_member[:, None, :] | ~visible).all(-1)
        last = torch.where(is_accepted, depth, -1).argmax(1)
        path = torch.where(visible[request, last], node, num_nodes).sort(dim=1).values[:, : spec_steps + 1]
        return {
            "accept_index": torch.where(path < num_nodes, path + request[:, None] * num_nodes, -1).int(),
            "accept_token_num": depth[request, last].int(),
        }

    return run


def _case(batch_size, tree, is_accepted):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    sizes |= {"num_candidates": 5, "is_accepted": is_accepted}
    depth = "full depth" if is_accepted else "accepts 0"
    return Case(f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {depth}", sizes)


BENCHMARK = Benchmark(
    path="verify.verify_tree_topp",
    cases=[
        _case(batch_size, tree, is_accepted)
        for tree in TREES[:2]
        for is_accepted in (True, False)
        for batch_size in (1, 8, ODD_BATCH, 32)
    ],
    small_cases=[_case(2, (4, 3, 8), is_accepted) for is_accepted in (True, False)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
