"""tree_from_mask over tree sizes, batch sizes and mask layouts."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import TREES, drafts
from bench.peers import sgl_kernel
from bench.peers.torch_compile import compiled
from bench.run import main
from eagle_kernels import reference


def make(device, batch_size, topk, spec_steps, num_nodes, tree_mask_mode):
    values = drafts("cpu", batch_size, topk, spec_steps, num_nodes)
    tree = reference.ops.tree.build_tree.build_tree(**values, tree_mask_mode=tree_mask_mode)
    tensors = {"tree_mask": tree.tree_mask.to(device), "seq_lens": values["seq_lens"].to(device)}
    return tensors | {"num_verify_tokens": num_nodes, "tree_mask_mode": tree_mask_mode}


def count_bytes(batch_size, topk, spec_steps, num_nodes, tree_mask_mode):
    row_bytes = num_nodes if tree_mask_mode == "qlen_only" else 8 * -(-num_nodes // 64)
    return batch_size * (8 + num_nodes * (row_bytes + 4 * 8))


def prepare_torch(values):
    """Tensor operations over [B, N, N]."""
    tree_mask, seq_lens, num_nodes = values["tree_mask"], values["seq_lens"], values["num_verify_tokens"]
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    is_packed = values["tree_mask_mode"] == "packed"

    def run():
        cells = (tree_mask[..., node // 64] >> (node % 64)) & 1 == 1 if is_packed else tree_mask
        seen = cells & (node < node[:, None])
        parent = torch.where(seen, node, -1).amax(-1)
        is_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None]
        is_later_sibling = is_sibling & (node > node[:, None])
        return {
            "positions": (seq_lens[:, None] + seen.sum(-1)).flatten(),
            "retrieve_index": retrieve_index,
            "retrieve_next_token": torch.where(seen.any(1), seen.int().argmax(1), -1),
            "retrieve_next_sibling": torch.where(is_later_sibling.any(-1), is_later_sibling.int().argmax(-1), -1),
        }

    return run


def _case(batch_size, tree, mode):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    return Case(f"N={num_nodes} B={batch_size} {mode}", sizes | {"tree_mask_mode": mode})


BENCHMARK = Benchmark(
    path="tree.tree_from_mask",
    cases=[_case(b, tree, mode) for mode in ("packed", "qlen_only") for tree in TREES for b in (1, 8, 32, 128)],
    small_cases=[_case(2, (4, 3, 8), mode) for mode in ("packed", "qlen_only")],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"sgl_kernel": sgl_kernel.tree_from_mask, "torch_compile": compiled(prepare_torch)},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
