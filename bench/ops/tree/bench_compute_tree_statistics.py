"""compute_tree_statistics over tree sizes and batch sizes."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import TREES, drafts
from bench.peers.torch_compile import compiled
from bench.run import main
from eagle_kernels import reference


def make(device, batch_size, topk, spec_steps, num_nodes):
    tree = reference.ops.tree.build_tree.build_tree(**drafts("cpu", batch_size, topk, spec_steps, num_nodes))
    links = {name: getattr(tree, name).to(device) for name in ("retrieve_next_token", "retrieve_next_sibling")}
    return links | {"spec_steps": spec_steps}


def count_bytes(batch_size, topk, spec_steps, num_nodes):
    return batch_size * (2 * 8 * num_nodes + 4 * (5 + spec_steps))


def prepare_torch(values):
    """Tensor operations over [B, N, N] for sound links: paths by matrix powers."""
    children, siblings = values["retrieve_next_token"], values["retrieve_next_sibling"]
    num_nodes, device = children.shape[1], children.device
    node = torch.arange(num_nodes, device=device)
    level = torch.arange(values["spec_steps"] + 1, device=device)
    identity = torch.eye(num_nodes, device=device)
    num_rounds = (num_nodes - 1).bit_length()

    def closed(steps):
        reached = steps.float() + identity
        for _ in range(num_rounds):
            reached = (reached @ reached).clamp(max=1.0)
        return reached

    def run():
        by_child = children[:, None, :] == node[:, None]
        by_sibling = siblings[:, None, :] == node[:, None]
        path = closed(by_child | by_sibling)
        is_linked = path[:, :, 0] > 0
        depth = torch.where(is_linked, (path @ by_child.any(-1).float()[..., None])[..., 0].int(), -1)
        place = closed(by_sibling).sum(-1).int()
        return {
            "depths": depth.amax(-1),
            "num_linked": is_linked.sum(-1).int(),
            "num_leaves": (is_linked & (children < 0)).sum(-1).int(),
            "max_branching": torch.where(is_linked & (node > 0), place, 0).amax(-1),
            "nodes_per_depth": (depth[:, :, None] == level).sum(1).int(),
        }

    return run


def _case(batch_size, tree):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    return Case(f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size}", sizes)


BENCHMARK = Benchmark(
    path="tree.compute_tree_statistics",
    cases=[_case(batch_size, tree) for tree in TREES for batch_size in (1, 8, 32, 128)],
    small_cases=[_case(2, (4, 3, 8))],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch)},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
